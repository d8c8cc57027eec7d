import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from payload.data.batch import Batch, empty_batch
from payload.drafter import step as step_module
from payload.drafter.anchors import Anchors, sample_anchors
from payload.drafter.config import FULL, SLIDING
from payload.drafter.loss import LossConfig, simulated_accepted_length
from payload.drafter.model import DFlashDrafter
from payload.drafter.step import drafter_loss
from tests.payload.drafter.builders import VOCABULARY, anchors_of, random_batch, seeded, tiny_config

MIXED = {"layer_types": (SLIDING, FULL), "sliding_window": 6}


def _setting(seed: int = 0, batch: Batch | None = None, anchors: int = 4, **changes):
    torch.manual_seed(seed)
    config = tiny_config(**changes)
    batch = batch or random_batch(seed)
    features = torch.randn(*batch.input_ids.shape, 32)
    head, embedding = torch.randn(VOCABULARY, 16), torch.randn(VOCABULARY, 16)
    return DFlashDrafter(config), head, embedding, batch, features, anchors_of(batch, anchors, seed)


@pytest.mark.parametrize("kind", ["ce", "dpace", "kl"])
def test_every_parameter_learns_and_the_loss_falls(kind):
    drafter, head, embedding, batch, features, anchors = _setting(**MIXED)
    teacher = torch.randn(2, 24, 16)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.02, weight_decay=0.0)
    means = []
    for _ in range(40):
        loss = drafter_loss(drafter, head, embedding, batch, features, anchors, LossConfig(kind), teacher)
        mean = loss.loss_sum / loss.weight_sum
        means.append(mean.item())
        optimizer.zero_grad()
        mean.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters())
        optimizer.step()
    assert means[-1] < 0.5 * means[0]


def test_counts_by_position_tell_what_a_memorising_drafter_would_have_accepted():
    drafter, head, embedding, batch, features, anchors = _setting()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.03, weight_decay=0.0)
    for _ in range(120):
        loss = drafter_loss(drafter, head, embedding, batch, features, anchors, LossConfig())
        optimizer.zero_grad()
        (loss.loss_sum / loss.weight_sum).backward()
        optimizer.step()
    assert loss.count_by_position[0] == 0
    assert (loss.count_by_position[1:].diff() <= 0).all(), "a slot counts only if all before it do"
    assert loss.count_by_position[1] == anchors.valid.sum()
    assert torch.equal(loss.correct_by_position, loss.count_by_position)
    assert torch.equal(loss.accepted_by_position, loss.count_by_position)
    assert simulated_accepted_length(loss.accepted_by_position, loss.count_by_position) == 4


def test_accepted_counts_stop_at_the_first_wrong_slot():
    drafter, head, embedding, batch, features, anchors = _setting(anchors=10)
    loss = drafter_loss(drafter, head, embedding, batch, features, anchors, LossConfig())
    assert (loss.accepted_by_position <= loss.correct_by_position).all()
    assert (loss.accepted_by_position[1:].diff() <= 0).all()


def test_a_document_does_not_see_its_packed_neighbours():
    """Everything of the other documents, and the future of each anchor, may change without moving a bit."""
    documents = torch.tensor([[0] * 10 + [1] * 10 + [-1] * 4], dtype=torch.int32)
    batch = random_batch(1, rows=1, length=24)
    positions = torch.tensor([[*range(10), *range(10), *range(4)]])
    batch = Batch(batch.input_ids, documents >= 0, documents, positions)
    drafter, head, embedding, batch, features, _ = _setting(batch=batch, **MIXED)
    anchors = Anchors(torch.tensor([[12, 15]]), torch.tensor([[True, True]]))
    before = drafter_loss(drafter, head, embedding, batch, features, anchors, LossConfig())

    other = batch.input_ids.clone()
    other[:, :10] = torch.randint(0, VOCABULARY - 1, (1, 10), generator=seeded(3))
    other[:, 20:] = 0
    changed = features.clone()
    changed[:, :10] += 1.0
    changed[:, 15:] -= 1.0
    after = drafter_loss(
        drafter, head, embedding, Batch(other, *batch.tensors()[1:]), changed, anchors, LossConfig()
    )
    for was, is_ in zip(before, after, strict=True):
        assert torch.equal(was, is_)


def test_rows_alone_or_packed_give_the_same_sums():
    drafter, head, embedding, batch, features, anchors = _setting(**MIXED)
    whole = drafter_loss(drafter, head, embedding, batch, features, anchors, LossConfig("dpace"))
    parts = [
        drafter_loss(
            drafter,
            head,
            embedding,
            Batch(*(tensor[row : row + 1] for tensor in batch.tensors())),
            features[row : row + 1],
            Anchors(*(tensor[row : row + 1] for tensor in anchors)),
            LossConfig("dpace"),
        )
        for row in range(2)
    ]
    for name in whole._fields:
        torch.testing.assert_close(getattr(whole, name), sum(getattr(part, name) for part in parts))


def test_an_empty_batch_gives_zero_loss_and_zero_gradients_so_no_rank_is_left_behind():
    batch = empty_batch(2, 12)
    drafter, head, embedding, batch, features, anchors = _setting(batch=batch)
    loss = drafter_loss(drafter, head, embedding, batch, features, anchors, LossConfig())
    loss.loss_sum.backward()
    assert loss.loss_sum == 0
    assert loss.weight_sum == 0
    assert all(p.grad is not None and (p.grad == 0).all() for p in drafter.parameters())


def test_the_target_stays_frozen():
    drafter, head, embedding, batch, features, anchors = _setting()
    for frozen in (head, embedding, features):
        frozen.requires_grad_()
    drafter_loss(
        drafter, head, embedding, batch, features.detach(), anchors, LossConfig()
    ).loss_sum.backward()
    assert head.grad is None
    assert embedding.grad is None


class _Wrapped(nn.Module):
    """Like DistributedDataParallel: keeps the module under ``module`` and shows none of its attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


def test_a_wrapped_drafter_gives_the_same_loss():
    drafter, *rest = _setting()
    plain = drafter_loss(drafter, *rest, LossConfig())
    wrapped = drafter_loss(_Wrapped(drafter), *rest, LossConfig())
    assert torch.equal(plain.loss_sum, wrapped.loss_sum)


@pytest.mark.parametrize("kind", ["ce", "dpace", "kl"])
def test_nothing_in_a_step_waits_for_a_value_on_the_device(kind):
    """Fake tensors have no values: an ``.item()``, a ``nonzero`` or a shape that depends on data would raise."""
    drafter, head, embedding, batch, features, _ = _setting(**MIXED)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = Batch(*(mode.from_tensor(tensor) for tensor in batch.tensors()))
        anchors = sample_anchors(fake.loss_mask, fake.document_ids, 5, seeded(0))
        loss = drafter_loss(
            drafter,
            mode.from_tensor(head),
            mode.from_tensor(embedding),
            fake,
            mode.from_tensor(features),
            anchors,
            LossConfig(kind),
            mode.from_tensor(torch.randn(2, 24, 16)),
        )
        loss.loss_sum.backward()
        simulated_accepted_length(loss.accepted_by_position, loss.count_by_position)


def test_the_whole_step_compiles_into_one_graph_once():
    drafter, head, embedding, batch, features, anchors = _setting(**MIXED)
    plain = drafter_loss(drafter, head, embedding, batch, features, anchors, LossConfig())
    plain.loss_sum.backward()
    gradients = [p.grad.clone() for p in drafter.parameters()]
    drafter.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(drafter_loss, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            drafter.zero_grad()
            loss = compiled(drafter, head, embedding, batch, features, anchors, LossConfig())
            loss.loss_sum.backward()
            batch, features = Batch(*(t.clone() for t in batch.tensors())), features.clone()
    torch.testing.assert_close(loss.loss_sum, plain.loss_sum)
    for parameter, gradient in zip(drafter.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_flex_mask_is_never_made_inside_a_whole_graph(monkeypatch):
    """There it once compiled to wrong gradients without a word; now the compilation stops."""
    setting = _setting()
    monkeypatch.setattr(step_module, "kernel_for", lambda device: "flex")
    torch._dynamo.reset()
    compiled = torch.compile(drafter_loss, backend="aot_eager", fullgraph=True, dynamic=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="wrong gradients"):
        compiled(*setting, LossConfig())
