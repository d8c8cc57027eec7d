import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from payload.data.batch import Batch, empty_batch
from payload.drafter.anchors import anchor_candidates, sample_anchors
from tests.payload.drafter.builders import anchors_of, batches, random_batch, seeded


def _may_be_anchor(batch: Batch, row: int, index: int) -> bool:
    if index + 1 >= batch.input_ids.shape[1]:
        return False
    documents = batch.document_ids[row]
    return bool(
        batch.loss_mask[row, index]
        and batch.loss_mask[row, index + 1]
        and documents[index] >= 0
        and documents[index] == documents[index + 1]
    )


@settings(deadline=None, max_examples=60)
@given(batch=batches)
def test_a_candidate_is_supervised_and_so_is_the_next_token_of_its_document(batch):
    candidates = anchor_candidates(batch.loss_mask, batch.document_ids)
    for row, index in torch.cartesian_prod(*(torch.arange(n) for n in candidates.shape)).tolist():
        assert bool(candidates[row, index]) == _may_be_anchor(batch, row, index)


@settings(deadline=None, max_examples=100)
@given(batch=batches, count=st.integers(1, 40), seed=st.integers(0, 1000))
def test_anchors_are_distinct_ascending_candidates_and_as_many_as_there_can_be(batch, count, seed):
    positions, valid = anchors_of(batch, count, seed)
    candidates = anchor_candidates(batch.loss_mask, batch.document_ids)
    assert positions.shape == valid.shape == (len(batch.input_ids), count)
    assert (positions.diff(dim=1) >= 0).all()
    assert torch.equal(valid.sum(1), candidates.sum(1).clamp(max=count))
    for row in range(len(positions)):
        chosen = positions[row][valid[row]].tolist()
        assert len(set(chosen)) == len(chosen)
        assert all(candidates[row, index] for index in chosen)
        assert torch.equal(valid[row], torch.arange(count) < len(chosen)), "valid ones come first"
        assert (positions[row][~valid[row]] == batch.input_ids.shape[1] - 1).all()


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=6),
    count=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_each_document_gets_its_share_of_anchors_to_within_two(lengths, count, seed):
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()[None]
    anchors = sample_anchors(torch.ones_like(documents, dtype=torch.bool), documents, count, seeded(seed))
    chosen = documents[0, anchors.positions[0][anchors.valid[0]]]
    total = sum(length - 1 for length in lengths)
    for document, length in enumerate(lengths):
        share = min(count, total) * (length - 1) / total
        assert abs(int((chosen == document).sum()) - share) <= 2


def test_every_candidate_is_drawn_equally_often():
    batch = random_batch(seed=3, rows=1, length=40)
    candidates = anchor_candidates(batch.loss_mask, batch.document_ids)[0]
    count, draws = 7, 4000
    rows = sample_anchors(
        batch.loss_mask.expand(draws, -1), batch.document_ids.expand(draws, -1), count, seeded(5)
    )
    drawn = torch.bincount(rows.positions.flatten(), minlength=40)[candidates].double()
    expected = count * draws / candidates.sum()
    assert (drawn / expected - 1).abs().max() < 5 * (1 / expected).sqrt()


def test_a_batch_of_padding_has_no_valid_anchor():
    batch = empty_batch(2, 8)
    assert not anchors_of(batch, 3).valid.any()


def test_the_same_seed_draws_the_same_anchors():
    batch = random_batch(seed=1)
    assert torch.equal(anchors_of(batch, 5, seed=9).positions, anchors_of(batch, 5, seed=9).positions)
    assert not torch.equal(anchors_of(batch, 5, seed=9).positions, anchors_of(batch, 5, seed=10).positions)
