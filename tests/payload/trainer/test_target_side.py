"""A target's share of a step, and that its functions are compiled before anything may no longer compile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from payload.data.batch import empty_batch
from payload.trainer.target_side import TargetSide
from payload.trainer.transfer import Supply


class Counting:
    """A target's program that only counts."""

    def __init__(self) -> None:
        self.computed = 0

    def produce(self, batch: Any) -> Supply:
        self.computed += 1
        return Supply(batch, torch.zeros(1, 1, 1), None)


def side_of(program: Counting, cache: Any = None) -> TargetSide:
    run: Any = SimpleNamespace(
        ranks=SimpleNamespace(rank=0, device=torch.device("cpu")),
        groups=SimpleNamespace(links=None),
        recipe=SimpleNamespace(train=SimpleNamespace(prefetch=2)),
    )
    rows: Any = SimpleNamespace(
        row_numbers=lambda number: [number],
        gather=lambda numbers: empty_batch(1, 1),
        batch=lambda number: empty_batch(1, 1),
    )
    return TargetSide(run, program, rows, None, cache)  # type: ignore[arg-type]


@pytest.mark.parametrize("shares_before", [0, 1])
def test_features_are_compiled_once_whether_or_not_the_first_step_has_a_share_for_this_rank(
    shares_before: int,
) -> None:
    program = Counting()
    side = side_of(program)
    for number in range(shares_before):
        side.produce(number)
    side.compile()
    side.compile()
    assert program.computed == 1


def test_features_that_are_read_from_disk_need_no_compiling() -> None:
    program = Counting()
    side_of(program, cache=object()).compile()
    assert program.computed == 0
