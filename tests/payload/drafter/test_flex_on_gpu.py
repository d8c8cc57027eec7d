"""On CUDA: the compiled flex path against the dense one, as training runs it."""

import pytest
import torch

from payload.data.batch import Batch
from payload.drafter import step as step_module
from payload.drafter.anchors import Anchors, sample_anchors
from payload.drafter.config import FULL, SLIDING
from payload.drafter.loss import LossConfig
from payload.drafter.model import DFlashDrafter
from payload.drafter.step import drafter_loss
from tests.payload.drafter.builders import VOCABULARY, random_batch, tiny_config

pytestmark = pytest.mark.gpu

CONFIG = tiny_config(
    hidden_size=128,
    intermediate_size=192,
    num_attention_heads=8,
    head_dim=32,
    block_size=16,
    layer_types=(SLIDING, FULL),
    sliding_window=40,
)


def _setting(dtype: torch.dtype, seed: int = 0):
    torch.manual_seed(seed)
    drafter = DFlashDrafter(CONFIG).cuda()
    batch = random_batch(seed, rows=3, length=300).to(torch.device("cuda"))
    head, embedding, features = (
        torch.randn(*shape, device="cuda", dtype=dtype)
        for shape in ((VOCABULARY, 128), (VOCABULARY, 128), (3, 300, 256))
    )
    generator = torch.Generator("cuda").manual_seed(seed)
    anchors = sample_anchors(batch.loss_mask, batch.document_ids, 24, generator)
    return drafter, head, embedding, batch, features, anchors


def _run(function, drafter, *rest):
    drafter.zero_grad()
    loss = function(drafter, *rest, LossConfig())
    (loss.loss_sum / loss.weight_sum).backward()
    return loss, [parameter.grad.clone() for parameter in drafter.parameters()]


def _assert_same(results, rtol: float) -> None:
    (loss, gradients), (expected, expected_gradients) = results
    torch.testing.assert_close(loss.loss_sum, expected.loss_sum, rtol=rtol, atol=0)
    assert torch.equal(loss.count_by_position, expected.count_by_position)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert (gradient - reference).norm() <= rtol * 10 * reference.norm()


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
def test_flex_gives_the_loss_and_gradients_of_the_dense_mask(monkeypatch, dtype, rtol):
    setting = _setting(dtype)
    flex = _run(drafter_loss, *setting)
    monkeypatch.setattr(step_module, "kernel_for", lambda device: "dense")
    _assert_same((flex, _run(drafter_loss, *setting)), rtol)


def test_a_second_batch_of_the_same_shapes_compiles_nothing():
    drafter, head, embedding, batch, features, anchors = _setting(torch.bfloat16)
    _run(drafter_loss, drafter, head, embedding, batch, features, anchors)
    other = random_batch(9, rows=3, length=300).to(torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(9)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            anchors = sample_anchors(other.loss_mask, other.document_ids, 24, generator)
            _run(drafter_loss, drafter, head, embedding, other, features, anchors)


def test_a_compiled_drafter_gives_the_same_gradients_and_compiles_once():
    setting = _setting(torch.bfloat16)
    plain = _run(drafter_loss, *setting)
    setting[0].compile(fullgraph=True, dynamic=False)
    _assert_same((_run(drafter_loss, *setting), plain), 2e-2)
    other = _setting(torch.bfloat16, seed=5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        _run(drafter_loss, setting[0], *other[1:])


def test_a_step_never_waits_for_the_gpu():
    setting = _setting(torch.bfloat16)
    _run(drafter_loss, *setting)
    drafter, head, embedding, batch, features, _ = setting
    generator = torch.Generator("cuda").manual_seed(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        anchors = sample_anchors(batch.loss_mask, batch.document_ids, 24, generator)
        loss = drafter_loss(drafter, head, embedding, batch, features, anchors, LossConfig("dpace"))
        (loss.loss_sum / loss.weight_sum).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_batch_without_anchors_has_a_finite_step():
    drafter, head, embedding, batch, features, _ = _setting(torch.bfloat16)
    batch = Batch(batch.input_ids, torch.zeros_like(batch.loss_mask), batch.document_ids, batch.position_ids)
    nothing = torch.zeros(3, 24, dtype=torch.bool, device="cuda")
    anchors = Anchors(torch.full((3, 24), 299, device="cuda"), nothing)
    loss = drafter_loss(drafter, head, embedding, batch, features, anchors, LossConfig())
    loss.loss_sum.backward()
    assert all((parameter.grad == 0).all() for parameter in drafter.parameters())
