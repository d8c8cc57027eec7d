"""A sharded drafter updates as a whole one does, waits for nothing, and is never gathered all at once."""

from __future__ import annotations

import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from payload.drafter.model import DFlashDrafter
from payload.trainer import checkpoint, evaluation
from payload.trainer.checkpoint import Progress, Snapshot
from payload.trainer.evaluation import evaluate_everywhere
from payload.trainer.program import DrafterProgram
from payload.trainer.roles import Roles
from payload.trainer.shards import whole_tensor
from tests.payload.trainer.test_parts import CONFIG, small_program, small_recipe, small_supply


def sharded_program(group: dist.ProcessGroup) -> DrafterProgram:
    """`small_program` with the same weights, over a group of one."""
    torch.manual_seed(0)
    weights = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size)
    return DrafterProgram(small_recipe(train__shard="fsdp2"), DFlashDrafter(CONFIG), weights, weights, group)


def step(program: DrafterProgram, number: int, spoiled: bool = False) -> torch.Tensor:
    sums = program.accumulate(small_supply(number), number, last=True)
    if spoiled:
        next(iter(program.optimizer.parameters)).grad.fill_(float("nan"))  # type: ignore[union-attr]
    return program.update(sums, lr=1e-2)


def whole_state(program: DrafterProgram) -> dict[str, torch.Tensor]:
    state = {**program.drafter.state_dict(), **program.optimizer.state_tensors()}
    return {name: whole_tensor(tensor).detach().clone() for name, tensor in state.items()}


def test_shards_update_as_the_whole_and_stay_as_they_are_after_an_unusable_gradient(
    alone_in_a_group: dist.ProcessGroup,
) -> None:
    sharded, whole = sharded_program(alone_in_a_group), small_program(small_recipe())
    for number in range(4):
        spoiled = number == 2
        before = whole_state(sharded)
        norms = [step(program, number, spoiled) for program in (sharded, whole)]
        torch.testing.assert_close(norms[0], norms[1], equal_nan=True)
        torch.testing.assert_close(whole_state(sharded), whole_state(whole))
        if spoiled:
            assert all(torch.equal(before[name], now) for name, now in whole_state(sharded).items())


class _CountsReads(TorchDispatchMode):
    """Counts what a host reads of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("resumed", [True, False])
def test_no_update_waits_to_read_the_device_fresh_or_resumed(
    alone_in_a_group: dist.ProcessGroup, sharded: bool, resumed: bool
) -> None:
    def made() -> DrafterProgram:
        return sharded_program(alone_in_a_group) if sharded else small_program(small_recipe())

    program = made()
    step(program, 0)
    if resumed:
        state = {name: whole_tensor(value) for name, value in program.optimizer.state_tensors().items()}
        program = made()
        program.optimizer.load_state_tensors(state)
    sums = program.accumulate(small_supply(1), 1, last=True)
    with _CountsReads() as counted:
        program.update(sums, lr=1e-2)
    assert counted.reads == 0


def watched(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many whole tensors were alive whenever the module had gathered one more."""
    gathered: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        whole = whole_tensor(tensor).clone()
        gathered.append(weakref.ref(whole))
        alive.append(sum(one() is not None for one in gathered))
        return whole

    monkeypatch.setattr(module, "whole_tensor", gather)
    return alive


def test_a_checkpoint_gathers_one_tensor_after_the_other(
    alone_in_a_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = sharded_program(alone_in_a_group)
    step(program, 0)
    expected = whole_state(program)
    alive = watched(checkpoint, monkeypatch)
    sharded = Snapshot(Progress(1, "id"), program.drafter.state_dict(), program.optimizer.state_tensors())
    copy = sharded.copied()
    sharded.help_to_copy()
    assert set(alive) == {1}
    assert len(alive) == 2 * len(expected)
    copied = {**copy.weights, **copy.optimizer}
    assert copied.keys() == expected.keys()
    assert all(torch.equal(copied[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("lead_is_target", [True, False])
def test_an_evaluation_gathers_one_tensor_after_the_other(
    alone_in_a_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, lead_is_target: bool
) -> None:
    program = sharded_program(alone_in_a_group)
    alive = watched(evaluation, monkeypatch)
    run: Any = SimpleNamespace(
        ranks=SimpleNamespace(rank=0, device=torch.device("cpu")),
        roles=Roles((0,) if lead_is_target else (1,), (0,), 1),
        groups=SimpleNamespace(evaluation=None, drafters=None),
        config=CONFIG,
        shape=SimpleNamespace(dtype=torch.float32),
    )
    got: dict[str, torch.Tensor] = {}
    side: Any = SimpleNamespace(evaluate=lambda state, compare_plain: got.update(state))
    evaluate_everywhere(run, side if lead_is_target else None, program, compare_plain=False)
    assert set(alive) == {1}
    state = {name: whole_tensor(tensor) for name, tensor in program.drafter.state_dict().items()}
    assert len(alive) == len(state)
    assert got.keys() == (state.keys() if lead_is_target else set())
    assert all(torch.equal(tensor, state[name].bfloat16().float()) for name, tensor in got.items())
