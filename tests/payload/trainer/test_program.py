"""One rank's update: the gradient of the weighted mean, in fp32, of the drafter alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist

from payload.drafter.anchors import sample_anchors
from payload.drafter.loss import LossConfig
from payload.drafter.model import DFlashDrafter
from payload.drafter.step import drafter_loss
from payload.recipe import OptimSpec
from payload.seeds import seed_of
from payload.trainer.program import DrafterProgram
from payload.trainer.schedule import learning_rate
from payload.trainer.transfer import Supply
from tests.payload.trainer.test_parts import CONFIG, small_program, small_recipe, small_supply


def less_supervised(supply: Supply, share: float) -> Supply:
    """The same micro-batch with only the first ``share`` of each row supervised."""
    mask = supply.batch.loss_mask.clone()
    mask[:, int(share * mask.shape[1]) :] = False
    batch = type(supply.batch)(
        supply.batch.input_ids, mask, supply.batch.document_ids, supply.batch.position_ids
    )
    return Supply(batch, supply.features, supply.teacher)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_a_step_with_many_slots_are_as_exact_as_the_type_of_the_features(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    recipe = small_recipe(train__num_anchors=1024)
    weights = 0.02 * torch.randn(CONFIG.vocab_size, CONFIG.hidden_size)
    drafter, supply = DFlashDrafter(CONFIG), small_supply(1)

    def gradient(of: torch.dtype) -> torch.Tensor:
        program = DrafterProgram(recipe, copy.deepcopy(drafter), weights.to(of), weights.to(of))
        sums = program.accumulate(supply._replace(features=supply.features.to(of)), 0, last=True)
        unit = sums[1] / program._nominal
        return torch.cat(
            [(p.grad / unit).flatten() for p in program.optimizer.parameters if p.grad is not None]
        )

    exact = gradient(torch.float32)
    error = (gradient(dtype) - exact).norm() / exact.norm()
    assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", ["ce", "dpace"])
def test_unequal_micro_batches_update_as_their_joint_weighted_mean(kind: str) -> None:
    """By plain autograd: the sum of the losses over the sum of their weights, differentiated once."""
    recipe = small_recipe(loss__kind=kind, optim__clip=1e9)
    program, plain = small_program(recipe), small_program(recipe)
    supplies = [small_supply(1), less_supervised(small_supply(2), 0.1)]
    sums = sum(program.accumulate(supply, number, last=number == 1) for number, supply in enumerate(supplies))
    norm = program.update(sums, lr=0.0)

    losses = []
    for number, supply in enumerate(supplies):
        generator = torch.Generator().manual_seed(seed_of(recipe.train.seed, number))
        anchors = sample_anchors(
            supply.batch.loss_mask, supply.batch.document_ids, recipe.train.num_anchors, generator
        )
        losses.append(
            drafter_loss(
                plain.drafter, plain.head, plain.embedding_weight, supply.batch, supply.features, anchors,
                LossConfig(kind, recipe.loss.gamma),  # type: ignore[arg-type]
            )
        )  # fmt: skip
    mean = sum(loss.loss_sum for loss in losses) / sum(loss.weight_sum for loss in losses)
    mean.backward()
    gradients = [parameter.grad for parameter in plain.drafter.parameters()]
    assert losses[0].weight_sum > 2 * losses[1].weight_sum, "the micro-batches must be unequal"
    assert norm.item() == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-5)
    assert (sums[0] / sums[1]).item() == pytest.approx(mean.item(), rel=1e-5)


def test_only_the_drafter_is_trained_and_the_targets_weights_stay() -> None:
    program = small_program(small_recipe())
    trained = {id(parameter) for parameter in program.optimizer.parameters}
    assert trained == {id(parameter) for parameter in program.drafter.parameters()}
    before = program.head.clone()
    program.update(program.accumulate(small_supply(1), 0, last=True), lr=0.1)
    assert torch.equal(program.head, before)
    assert program.head.grad is None


def test_norms_of_a_bf16_run_move_by_less_than_bf16_can_tell() -> None:
    """In bf16 the neighbours of 1 are 0.004 away: without fp32 masters a norm would never move."""
    recipe = small_recipe()
    weights = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, dtype=torch.bfloat16)
    program = DrafterProgram(recipe, DFlashDrafter(CONFIG), weights, weights)
    supply = small_supply(1)
    supply = Supply(supply.batch, supply.features.bfloat16(), None)
    for number in range(3):
        program.update(program.accumulate(supply, number, last=True), lr=1e-5)
    moved = (program.drafter.norm.weight - 1).abs()
    assert program.drafter.norm.weight.dtype == torch.float32
    assert ((moved > 0) & (moved < 1e-4)).all()


def test_gradients_are_reduced_once_a_step_however_many_micro_batches(
    alone_in_a_group: dist.ProcessGroup,
) -> None:
    torch.manual_seed(0)
    weights = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size)
    program = DrafterProgram(small_recipe(), DFlashDrafter(CONFIG), weights, weights, alone_in_a_group)
    reduced: list[int] = []

    # Without annotations: torch reads them, and would not take them as text.
    def count(state, bucket):
        reduced.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    program._module.register_comm_hook(None, count)  # type: ignore[operator]
    for number in range(4):
        program.accumulate(small_supply(number), number, last=number == 3)
        assert bool(reduced) == (number == 3)


def test_schedules_follow_their_formulas() -> None:
    optim = OptimSpec(lr=2.0, schedule="cosine", warmup=0.1, min_lr_ratio=0.1)
    quarter = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    assert learning_rate(10 + 45 // 2, 100, optim) > 2 * quarter > learning_rate(10 + 45 // 2 + 1, 100, optim)
    wsd = OptimSpec(lr=2.0, schedule="wsd", warmup=0.1, decay=0.2, min_lr_ratio=0.1)
    assert learning_rate(85, 100, wsd) == pytest.approx(2 * quarter)
    assert learning_rate(90, 100, wsd) == pytest.approx(2 * 0.55)
    assert learning_rate(1, 100, OptimSpec(lr=2.0, warmup=0.0)) == pytest.approx(2.0, rel=1e-3)
