"""FP8 products, which a CPU computes too: close to exact ones, and in no weight's gradient."""

import pytest
import torch

from payload.drafter.fp8 import GRADIENTS, VALUES, fp8_head, fp8_linear, product, scaled
from payload.drafter.loss import LossConfig, draft_loss, reference_draft_loss
from payload.drafter.model import DFlashDrafter, reference_hidden
from payload.drafter.row_slope import NARROW_SCALE, row_slope
from payload.drafter.step import block_inputs
from payload.errors import PayloadError
from tests.payload.drafter.builders import anchors_of, random_batch, seeded, tiny_config

MIXED = tiny_config(hidden_size=32, intermediate_size=48)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).double().norm() / b.double().norm())


@pytest.mark.parametrize(("dtype", "error"), [(VALUES, 0.03), (GRADIENTS, 0.06)])
def test_a_scaled_tensor_keeps_its_values_to_the_bits_of_its_type(dtype, error):
    x = torch.randn(64, 32, generator=seeded(0)) * 1e-6
    narrow = scaled(x, dtype)
    assert narrow.values.dtype == dtype
    assert _distance(narrow.values.float() * narrow.scale, x) < error
    assert scaled(torch.zeros(4, 4), dtype).values.float().abs().sum() == 0


def test_a_product_of_scaled_tensors_is_near_the_exact_one():
    a, b = torch.randn(2, 32, 64, generator=seeded(1)).unbind()
    out = product(scaled(a, VALUES), scaled(b, VALUES), torch.float32, precise=True)
    assert _distance(out, a @ b.T) < 0.06


def test_a_linear_map_rounds_its_result_and_its_inputs_gradient_but_not_its_weights():
    x = torch.randn(3, 16, 32, generator=seeded(2)).bfloat16().requires_grad_()
    weight = torch.randn(48, 32, generator=seeded(3)).bfloat16().requires_grad_()
    grad = torch.randn(3, 16, 48, generator=seeded(4)).bfloat16()
    out = fp8_linear(x, weight)
    got = torch.autograd.grad(out, (x, weight), grad)
    exact = x @ weight.T
    dx, dweight = torch.autograd.grad(exact, (x, weight), grad)
    assert 1e-4 < _distance(out, exact) < 0.06
    assert 1e-4 < _distance(got[0], dx) < 0.1
    assert torch.equal(got[1], dweight)


def test_a_slope_in_eight_bits_keeps_the_small_probabilities_of_an_untrained_head():
    logits = torch.randn(4, 50_000, generator=seeded(5)).bfloat16()
    labels = torch.arange(4)
    wide, narrow = row_slope(logits, labels), row_slope(logits, labels, narrow=True)
    assert torch.equal(wide.loss, narrow.loss)
    assert _distance(narrow.slope.float() * NARROW_SCALE, wide.slope.float()) < 0.06
    small = narrow.slope.float()[:, 10:] * NARROW_SCALE
    assert _distance(small, wide.slope.float()[:, 10:]) < 0.06, "and not only the label's"


@pytest.mark.parametrize("kind", ["ce", "dpace", "kl"])
def test_a_head_in_fp8_gives_nearly_the_loss_and_gradient_of_the_exact_one(kind):
    hidden = torch.randn(8, 4, 32, generator=seeded(6)).bfloat16()
    head = (torch.randn(64, 32, generator=seeded(7)) / 6).bfloat16()
    teacher = torch.randn(8, 4, 32, generator=seeded(8)).bfloat16()
    labels = torch.randint(0, 64, (8, 4), generator=seeded(9))
    counted = torch.rand(8, 4, generator=seeded(10)) < 0.8
    results = []
    for function, of in ((draft_loss, fp8_head(head)), (reference_draft_loss, head)):
        leaf = hidden.clone().requires_grad_()
        loss = function(leaf, of, labels, counted, LossConfig(kind), teacher)
        loss.loss_sum.backward()
        results.append((loss.loss_sum.detach(), loss.weight_sum, leaf.grad))
    assert _distance(results[0][0], results[1][0]) < 0.02
    assert _distance(results[0][1], results[1][1]) < 0.02
    assert _distance(results[0][2], results[1][2]) < 0.1


def test_feed_forward_layers_in_fp8_change_the_drafter_by_rounding_alone():
    torch.manual_seed(0)
    drafter = DFlashDrafter(MIXED)
    drafter.use_fp8_mlp()
    batch = random_batch(0)
    inputs = block_inputs(
        MIXED, torch.randn(50, 32), batch, anchors_of(batch, 8), torch.bfloat16, kernel="dense"
    )
    features = torch.randn(2, 24, 64).bfloat16()
    arguments = (features, inputs.embeddings, inputs.rotary, inputs.masks)
    results = []
    for hidden in (drafter(*arguments), reference_hidden(drafter, *arguments)):
        drafter.zero_grad()
        hidden.float().square().sum().backward()
        results.append([hidden.detach(), *(parameter.grad for parameter in drafter.parameters())])
    assert not torch.equal(results[0][0], results[1][0])
    for narrow, wide in zip(*results, strict=True):
        assert _distance(narrow, wide) < 0.3


def test_matrices_of_odd_sizes_are_refused_by_name():
    with pytest.raises(PayloadError, match=r"head's matrices \[50, 32\]"):
        fp8_head(torch.zeros(50, 32))
    with pytest.raises(PayloadError, match=r"mlp's matrices \[16, 24\]"):
        DFlashDrafter(tiny_config()).use_fp8_mlp()
