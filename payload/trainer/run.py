"""What every rank of a run knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from payload.drafter.config import DrafterConfig
from payload.recipe import Recipe
from payload.trainer.ranks import Pace, Ranks, StopSignal
from payload.trainer.roles import Roles
from payload.trainer.transfer import Links, SupplyShape


@dataclass(frozen=True)
class Groups:
    """Process groups; None where a group would have one member. ``evaluation``: the lead drafter and the targets;
    ``links``: those over which features travel."""

    drafters: dist.ProcessGroup | None
    targets: dist.ProcessGroup | None
    evaluation: dist.ProcessGroup | None
    links: Links


@dataclass(frozen=True)
class Run:
    """What every rank knows of the run."""

    recipe: Recipe
    run_dir: Path
    ranks: Ranks
    roles: Roles
    groups: Groups
    pace: Pace
    stop: StopSignal
    config: DrafterConfig
    shape: SupplyShape
    first_step: int
    evaluates: bool
    data_facts: dict[str, Any]

    def evaluates_after(self, step: int) -> bool:
        """Whether the held-out prompts are decoded after a step; the same answer on every rank.

        A run that was told to stop does not evaluate at its end, which all ranks know by then.
        """
        if not self.evaluates:
            return False
        if step == self.recipe.train.steps:
            return True
        return step % self.recipe.train.eval_every == 0 and step != self.pace.last_step
