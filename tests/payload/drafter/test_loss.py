import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from payload.drafter import loss as loss_module
from payload.drafter.loss import (
    LossConfig,
    block_labels,
    decay_weights,
    default_gamma,
    dpace_weights,
    draft_loss,
    reference_draft_loss,
    simulated_accepted_length,
)
from payload.drafter.row_slope import row_slope
from payload.errors import PayloadError
from tests.payload.drafter.builders import anchors_of, batches, random_batch, seeded

KINDS = ("ce", "dpace", "kl")


def _blocks(seed: int, count: int, slots: int = 3, hidden: int = 6, vocabulary: int = 11):
    """hidden, head, labels, counted and teacher of ``count`` blocks, in float64."""
    generator = seeded(seed)
    return (
        torch.randn(count, slots, hidden, generator=generator, dtype=torch.float64),
        torch.randn(vocabulary, hidden, generator=generator, dtype=torch.float64),
        torch.randint(0, vocabulary, (count, slots), generator=generator),
        torch.rand(count, slots, generator=generator) < 0.7,
        torch.randn(count, slots, hidden, generator=generator, dtype=torch.float64),
    )


@settings(deadline=None, max_examples=60)
@given(batch=batches, count=st.integers(1, 5), size=st.integers(2, 6))
def test_a_slot_counts_while_its_answer_goes_on_in_the_document_of_its_anchor(batch, count, size):
    anchors = anchors_of(batch, count)
    labels, counted = block_labels(batch.input_ids, batch.loss_mask, batch.document_ids, anchors, size)
    length = batch.input_ids.shape[1]
    for row in range(len(labels)):
        for block, anchor in enumerate(anchors.positions[row].tolist()):
            going_on = bool(anchors.valid[row, block])
            assert not counted[row, block, 0], "the anchor itself carries no loss"
            for slot in range(1, size):
                index = anchor + slot
                going_on = bool(
                    going_on
                    and index < length
                    and batch.loss_mask[row, index]
                    and batch.document_ids[row, index] == batch.document_ids[row, anchor]
                )
                assert bool(counted[row, block, slot]) == going_on
                if going_on:
                    assert labels[row, block, slot] == batch.input_ids[row, index], "no shift"


def test_a_block_never_learns_tokens_of_the_next_packed_document():
    batch = random_batch(seed=0, rows=1, length=20, documents=2, supervised=1.0)
    documents = torch.tensor([[0] * 10 + [1] * 10], dtype=torch.int32)
    mask = torch.ones(1, 20, dtype=torch.bool)
    anchors = anchors_of(batch, 1)._replace(positions=torch.tensor([[7]]), valid=torch.tensor([[True]]))
    _, counted = block_labels(batch.input_ids, mask, documents, anchors, 6)
    assert counted[0, 0].tolist() == [False, True, True, False, False, False]


def test_decay_weights_follow_the_published_formula():
    weights = decay_weights(torch.tensor([True, True, False, True]), gamma=7.0)
    assert weights.tolist() == pytest.approx([1.0, math.exp(-1 / 7), 0.0, math.exp(-3 / 7)])
    assert [default_gamma(size) for size in (8, 10, 16, 32)] == [4.0, 5.0, 7.0, 14.0]


def test_dpace_weights_are_the_expected_accepted_drafts_from_each_slot_on():
    q = torch.tensor([0.8, 0.2, 0.6], dtype=torch.float64)
    s = [0.9, 0.6, 0.8]
    weights = dpace_weights(-q.log(), torch.tensor([True, True, True]), alpha=0.5)
    expected = [
        s[0] + s[0] * s[1] + s[0] * s[1] * s[2],
        s[0] * s[1] + s[0] * s[1] * s[2],
        s[0] * s[1] * s[2],
    ]
    assert weights.tolist() == pytest.approx(expected)
    short = dpace_weights(-q.log(), torch.tensor([True, True, False]), alpha=0.5)
    assert short.tolist() == pytest.approx([s[0] + s[0] * s[1], s[0] * s[1], 0.0])


def test_dpace_weights_carry_no_gradient():
    cross_entropy = torch.rand(2, 3, requires_grad=True)
    assert not dpace_weights(cross_entropy, torch.ones(2, 3, dtype=torch.bool), 0.5).requires_grad


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
    count=st.integers(1, 9),
    slots=st.integers(1, 5),
    chunk=st.integers(1, 20),
)
def test_chunked_loss_and_gradient_equal_the_reference(kind, seed, count, slots, chunk):
    hidden, head, labels, counted, teacher = _blocks(seed, count, slots)
    config = LossConfig(kind, chunk_rows=chunk)
    results = []
    for function in (draft_loss, reference_draft_loss):
        leaf = hidden.clone().requires_grad_()
        loss = function(leaf, head, labels, counted, config, teacher)
        (3 * loss.loss_sum).backward()
        results.append((loss.loss_sum.detach(), loss.weight_sum, leaf.grad))
        correct = loss.correct
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-12)
    assert torch.equal(correct, reference_draft_loss(hidden, head, labels, counted, config, teacher).correct)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), kind=st.sampled_from(KINDS), seed=st.integers(0, 1000), count=st.integers(2, 9))
def test_the_mean_and_its_gradient_do_not_depend_on_how_the_blocks_were_split(data, kind, seed, count):
    hidden, head, labels, counted, teacher = _blocks(seed, count)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1))))
    sizes = [end - start for start, end in zip([0, *cuts], [*cuts, count], strict=True)]
    means, gradients = [], []
    for parts in ([count], sizes):
        leaf = hidden.clone().requires_grad_()
        pieces = [x.split(parts) for x in (leaf, labels, counted, teacher)]
        losses = [
            draft_loss(h, head, label, count_, LossConfig(kind), t)
            for h, label, count_, t in zip(*pieces, strict=True)
        ]
        weight = sum(loss.weight_sum for loss in losses)
        for loss in losses:
            (loss.loss_sum / weight.clamp(min=1e-30)).backward()
        means.append(sum(loss.loss_sum for loss in losses).detach() / weight.clamp(min=1e-30))
        gradients.append(leaf.grad)
    torch.testing.assert_close(means[0], means[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_kl_is_zero_with_zero_gradient_where_drafter_and_target_agree():
    hidden, head, labels, counted, _ = _blocks(1, 4)
    leaf = hidden.clone().requires_grad_()
    loss = draft_loss(leaf, head, labels, counted, LossConfig("kl"), teacher=hidden)
    loss.loss_sum.backward()
    assert abs(loss.loss_sum.item()) < 1e-12
    assert leaf.grad.abs().max() < 1e-12


def test_slots_that_do_not_count_add_nothing_and_get_no_gradient():
    hidden, head, labels, counted, teacher = _blocks(2, 5)
    for kind in KINDS:
        leaf = hidden.clone().requires_grad_()
        loss = draft_loss(leaf, head, labels, counted, LossConfig(kind), teacher)
        loss.loss_sum.backward()
        assert (leaf.grad[~counted] == 0).all()
        assert (leaf.grad[counted] != 0).any(-1).all()
        assert not loss.correct[~counted].any()
    nothing = draft_loss(hidden, head, labels, torch.zeros_like(counted), LossConfig("dpace"))
    assert nothing.loss_sum == 0
    assert nothing.weight_sum == 0


def test_the_frozen_head_gets_no_gradient():
    hidden, head, labels, counted, _ = _blocks(3, 4)
    head.requires_grad_()
    draft_loss(hidden.requires_grad_(), head, labels, counted, LossConfig()).loss_sum.backward()
    assert head.grad is None


def test_sums_of_a_bf16_model_are_kept_in_fp32():
    hidden, head, labels, counted, teacher = _blocks(4, 40)
    wide = draft_loss(hidden, head, labels, counted, LossConfig("kl"), teacher)
    narrow = draft_loss(
        hidden.bfloat16().requires_grad_(),
        head.bfloat16(),
        labels,
        counted,
        LossConfig("kl"),
        teacher.bfloat16(),
    )
    assert narrow.loss_sum.dtype == narrow.weight_sum.dtype == torch.float32
    assert narrow.loss_sum.item() == pytest.approx(wide.loss_sum.item(), rel=0.02)


class _LargestLogits(TorchDispatchMode):
    """Remembers the most rows of any tensor as wide as the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary:
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_rows_of_logits_than_a_chunk_ever_exist(kind):
    hidden, head, labels, counted, teacher = _blocks(5, 64, slots=3, vocabulary=97)
    with _LargestLogits(97) as watch:
        loss = draft_loss(
            hidden.requires_grad_(), head, labels, counted, LossConfig(kind, chunk_rows=12), teacher
        )
        loss.loss_sum.backward()
    assert watch.rows == 12


def test_a_chunks_logits_are_gone_before_the_next_chunks_come(monkeypatch):
    hidden, head, labels, counted, _ = _blocks(7, 8)
    alive: list[weakref.ref] = []

    def watched(logits, *rest):
        assert not any(earlier() is not None for earlier in alive)
        alive.append(weakref.ref(logits))
        return row_slope(logits, *rest)

    monkeypatch.setattr(loss_module, "row_slope", watched)
    draft_loss(hidden.requires_grad_(), head, labels, counted, LossConfig(chunk_rows=5))
    assert len(alive) == 5


def test_the_simulated_accepted_length_runs_from_one_to_the_block_size():
    counts = torch.tensor([0, 10, 8, 5])
    assert simulated_accepted_length(counts, counts) == 4
    assert simulated_accepted_length(torch.zeros(4, dtype=torch.long), counts) == 1
    assert simulated_accepted_length(torch.tensor([0, 5, 2, 0]), counts).item() == pytest.approx(1.75)
    assert simulated_accepted_length(torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)) == 1


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"kind": "mse"}, "mse"),
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": math.inf}, "gamma"),
        ({"dpace_alpha": 0.0}, "dpace_alpha"),
        ({"dpace_alpha": 1.0}, "dpace_alpha"),
        ({"chunk_rows": 0}, "chunk_rows"),
    ],
)
def test_impossible_loss_settings_are_refused_by_name(values, part):
    with pytest.raises(PayloadError, match=part) as caught:
        LossConfig(**values)
    assert caught.value.kind == "usage"


def test_kl_without_the_targets_hidden_states_is_refused():
    hidden, head, labels, counted, _ = _blocks(6, 2)
    with pytest.raises(PayloadError, match="kl"):
        draft_loss(hidden, head, labels, counted, LossConfig("kl"))
