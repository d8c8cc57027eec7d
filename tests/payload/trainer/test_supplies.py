"""Whatever rank has whichever role: every drafter gets its micro-batches in order, and no two ranks wait for each
other. Ranks are threads here, and what travels between them is matched as messages of one link are: in order."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from payload.data.batch import empty_batch
from payload.trainer import transfer
from payload.trainer.roles import Roles
from payload.trainer.supplies import Supplies
from payload.trainer.transfer import Outbox, Supply, SupplyShape

STEPS = 2
PATIENCE_S = 5.0
SHAPE = SupplyShape(batch_size=1, length=1, features=1, teacher=0, dtype=torch.float32)
CPU = torch.device("cpu")


@dataclass
class Handle:
    """Of a tensor sent or a receive posted: over once the other end is there."""

    wait: Callable[[], None]


@dataclass
class Wire:
    """Sends and receives between threads, each link's n-th send for its n-th receive."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    here: threading.local = field(default_factory=threading.local)
    sent: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    posted: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))

    def isend(self, tensor: torch.Tensor, to: int, group: object) -> Handle:
        return self._put(self.sent, self.posted, (self.here.rank, to), tensor)

    def irecv(self, buffer: torch.Tensor, producer: int, group: object) -> Handle:
        return self._put(self.posted, self.sent, (producer, self.here.rank), buffer)

    def _put(self, own: dict[Any, Any], other: dict[Any, Any], link: Any, tensor: torch.Tensor) -> Handle:
        with self.changed:
            own[link].append(tensor)
            number = len(own[link]) - 1
            if len(other[link]) > number:
                # Once, when both are there: afterwards the buffer may be another message's.
                self.posted[link][number].copy_(self.sent[link][number])
            self.changed.notify_all()

        def wait() -> None:
            with self.changed:
                met = self.changed.wait_for(lambda: len(other[link]) > number, PATIENCE_S)
                assert met, f"the other end of {link} never came to message {number}"

        return Handle(wait)


def consumed(roles: Roles, prefetch: int) -> dict[int, list[int]]:
    """What each drafter got, step by step, when the drafters meet once a micro-batch as sharded ones do."""
    wire = Wire()
    meeting = threading.Barrier(len(roles.drafters), timeout=PATIENCE_S)
    links = SimpleNamespace(group=lambda producer, consumer: None)
    made: dict[int, int] = defaultdict(int)

    def produce(number: int) -> Supply:
        made[number] += 1
        return Supply(empty_batch(1, 1), torch.full((1, 1, 1), float(number)), None)

    def run_rank(rank: int) -> list[int]:
        wire.here.rank = rank
        run: Any = SimpleNamespace(
            ranks=SimpleNamespace(rank=rank, device=CPU),
            roles=roles,
            groups=SimpleNamespace(links=links),
            shape=SHAPE,
            recipe=SimpleNamespace(train=SimpleNamespace(prefetch=prefetch)),
            pace=SimpleNamespace(last_step=STEPS),
            evaluates_after=lambda step: step == STEPS,
        )
        side: Any = None
        if rank in roles.targets:
            side = SimpleNamespace(produce=produce, outbox=Outbox(rank, links, CPU, prefetch))  # type: ignore[arg-type]
        supplies, got = Supplies(run, side), []
        for step in range(1, STEPS + 1):
            if rank not in roles.drafters:
                for number in roles.produced_by(rank, step):
                    side.outbox.send(produce(number), roles.consumer(number))
            for number in roles.consumed_by(rank, step):
                got.append(int(supplies.take(number, step).features))
                meeting.wait()
        if side is not None:
            side.outbox.flush()
        return got

    ranks = sorted({*roles.targets, *roles.drafters})
    with (
        mock.patch.object(transfer.dist, "isend", wire.isend),
        mock.patch.object(transfer.dist, "irecv", wire.irecv),
        ThreadPoolExecutor(len(ranks)) as pool,
    ):
        results = dict(zip(ranks, pool.map(run_rank, ranks), strict=True))
    assert all(times == 1 for times in made.values())
    return {rank: results[rank] for rank in roles.drafters}


@st.composite
def splits(draw: st.DrawFn) -> Roles:
    ranks = st.permutations(range(draw(st.integers(1, 5))))
    targets = draw(ranks)[: draw(st.integers(1, 5))]
    drafters = draw(ranks)[: draw(st.integers(1, 5))]
    return Roles(tuple(targets), tuple(drafters), draw(st.integers(1, 7)))


@given(splits(), st.integers(1, 3))
@example(Roles((0, 1), (1, 0), 4), 2)
@example(Roles((0, 1, 2), (0, 1), 12), 2)
@example(Roles((0, 1, 2), (1, 2, 0, 3, 4, 5), 3), 1)
@settings(max_examples=60, deadline=None)
def test_no_split_of_the_roles_makes_ranks_wait_for_each_other(roles: Roles, prefetch: int) -> None:
    expected = {
        rank: [number for step in range(1, STEPS + 1) for number in roles.consumed_by(rank, step)]
        for rank in roles.drafters
    }
    assert consumed(roles, prefetch) == expected


def test_a_rank_with_both_roles_holds_no_more_supplies_than_it_may_make_ahead() -> None:
    roles = Roles((0,), (0,), accumulation=9)
    run: Any = SimpleNamespace(
        ranks=SimpleNamespace(rank=0, device=CPU),
        roles=roles,
        groups=SimpleNamespace(links=None),
        shape=SHAPE,
        recipe=SimpleNamespace(train=SimpleNamespace(prefetch=2)),
        pace=SimpleNamespace(last_step=STEPS),
        evaluates_after=lambda step: False,
    )
    made: list[int] = []

    def produce(number: int) -> Supply:
        made.append(number)
        return Supply(empty_batch(1, 1), torch.zeros(1, 1, 1), None)

    side: Any = SimpleNamespace(produce=produce)
    supplies = Supplies(run, side)
    for taken, number in enumerate(roles.consumed_by(0, 1), start=1):
        supplies.take(number, 1)
        assert taken <= len(made) <= taken + 1
    assert made == list(roles.micro_batches(1))
