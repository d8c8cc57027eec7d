"""Which rank does what: a pure function of the recipe, so that every rank knows every other rank's part.

Step s (counted from 1) has ``accumulation`` micro-batches for each drafter. Micro-batches are numbered through the
whole run; number g is produced by target g mod T and consumed by drafter g mod D. Both ends of every transfer thus
handle their micro-batches in rising order. `supplies` says why no two ranks can wait for each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from payload.errors import PayloadError
from payload.recipe import Recipe


@dataclass(frozen=True)
class Roles:
    """The plan of one run. ``targets`` and ``drafters`` are ranks."""

    targets: tuple[int, ...]
    drafters: tuple[int, ...]
    accumulation: int

    @property
    def lead_target(self) -> int:
        """The target rank that prepares the data and describes the target to the others."""
        return self.targets[0]

    @property
    def lead_drafter(self) -> int:
        """The drafter rank that logs, writes checkpoints and decides for all."""
        return self.drafters[0]

    @property
    def micro_batches_per_step(self) -> int:
        return self.accumulation * len(self.drafters)

    def micro_batches(self, step: int) -> range:
        """Numbers of the micro-batches of a step >= 1, rising."""
        first = (step - 1) * self.micro_batches_per_step
        return range(first, first + self.micro_batches_per_step)

    def producer(self, micro_batch: int) -> int:
        return self.targets[micro_batch % len(self.targets)]

    def consumer(self, micro_batch: int) -> int:
        return self.drafters[micro_batch % len(self.drafters)]

    def last_of_round(self, micro_batch: int, ahead: int = 0) -> int:
        """The last micro-batch of the round of one, or of the round that comes ``ahead`` rounds later.

        A round has one micro-batch for each drafter; a step has ``accumulation`` rounds.
        """
        size = len(self.drafters)
        return (micro_batch // size + 1 + ahead) * size - 1

    def links(self) -> list[tuple[int, int]]:
        """Every (producer, consumer) between which something travels in the course of a run, in one order for all."""
        numbers = range(math.lcm(len(self.targets), len(self.drafters)))
        pairs = {(self.producer(number), self.consumer(number)) for number in numbers}
        return sorted((producer, consumer) for producer, consumer in pairs if producer != consumer)

    def produced_by(self, rank: int, step: int) -> list[int]:
        return [number for number in self.micro_batches(step) if self.producer(number) == rank]

    def consumed_by(self, rank: int, step: int) -> list[int]:
        return [number for number in self.micro_batches(step) if self.consumer(number) == rank]


def roles_of(recipe: Recipe, world_size: int) -> Roles:
    """The plan of a recipe. Raises ``PayloadError`` (kind usage) when the job has another number of ranks."""
    topology = recipe.topology
    if world_size != topology.world_size:
        raise PayloadError(
            f"The recipe's topology names {topology.world_size} ranks, but the job has {world_size}.",
            hint=f"Start it with --nproc-per-node {topology.world_size}, or change topology.",
            kind="usage",
        )
    return Roles(topology.targets, topology.drafters, recipe.train.accumulation)
