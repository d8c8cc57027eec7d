"""On CUDA: the step as training runs it, compiled and with its own kernel, against the plainest form of it."""

import pytest
import torch

from benchmarks.step_measure import assert_never_waits, one_step
from benchmarks.step_shapes import SHAPES, build_program, build_supply, recipe_of
from benchmarks.step_variants import variant
from payload.compile.guard import install
from payload.drafter import step as step_module
from payload.drafter.row_slope import NARROW_SCALE, narrowed, reference_row_slope, row_slope

pytestmark = pytest.mark.gpu

SHAPE = SHAPES["tiny-gpu"]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [5, 4096, 32_000, 151_936])
def test_the_kernel_gives_the_loss_prediction_and_slope_of_torchs_own_operations(dtype, columns):
    generator = torch.Generator("cuda").manual_seed(columns)
    logits = (torch.randn(33, columns, device="cuda", generator=generator) * 4).to(dtype)
    labels = torch.randint(columns, (33,), device="cuda", generator=generator)
    expected = reference_row_slope(logits, labels)
    narrow = row_slope(logits.clone(), labels, narrow=True)
    found = row_slope(logits.clone(), labels)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.predicted, expected.predicted), "the first of equal logits, as argmax"
    assert _distance(found.slope, expected.slope) < (1e-5 if dtype == torch.float32 else 4e-3)
    torch.testing.assert_close(narrow.loss, found.loss, rtol=1e-6, atol=1e-6)
    assert (
        _distance(narrow.slope.float() * NARROW_SCALE, narrowed(expected.slope).float() * NARROW_SCALE) < 0.02
    )


def _outcome(program, supply) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    sums = program.accumulate(supply, 0, last=True)
    gradients = [parameter.grad.clone() for parameter in program.drafter.parameters()]
    program.update(sums, 1e-3)
    return sums, gradients, [parameter.detach().clone() for parameter in program.drafter.parameters()]


@pytest.mark.parametrize(
    ("loss", "fp8", "limit"), [("ce", (), 0.04), ("dpace", (), 0.04), ("ce", ("head", "mlp"), 0.3)]
)
def test_the_compiled_step_equals_the_uncompiled_dense_reference(monkeypatch, loss, fp8, limit):
    device = torch.device("cuda")
    plain_recipe, recipe = recipe_of(SHAPE, loss), recipe_of(SHAPE, loss, fp8)
    supply = build_supply(SHAPE, recipe, device)
    with monkeypatch.context() as patch, variant("reference", block_size=SHAPE.drafter.block_size):
        patch.setattr(step_module, "kernel_for", lambda device: "dense")
        expected = _outcome(build_program(SHAPE, plain_recipe, device, compiled=False), supply)
    torch._dynamo.reset()
    guard = install()
    guard.unseal()
    program = build_program(SHAPE, recipe, device, compiled=True)
    with guard.first_step():
        sums, gradients, weights = _outcome(program, supply)
    assert _distance(sums[:2], expected[0][:2]) < 5e-3
    assert torch.equal(sums[12:20], expected[0][12:20]), "which slots count"
    assert all(_distance(*pair) < limit for pair in zip(gradients, expected[1], strict=True))
    assert all(_distance(*pair) < 5e-2 for pair in zip(weights, expected[2], strict=True))
    guard.seal()
    try:
        other = build_supply(SHAPE, recipe, device, seed=3)
        assert_never_waits(lambda number: one_step(program, other, number))
        for number in range(2):
            with guard.steady():
                one_step(program, supply, number)
    finally:
        guard.unseal()
