"""A rank's part as a target: features for the drafters, and decoding of the held-out prompts."""

from __future__ import annotations

import time

import torch

from payload.acceptance import Acceptance
from payload.data.feature_cache import FeatureCache
from payload.data.prepared import PackedRows
from payload.drafter.model import DFlashDrafter
from payload.trainer.evaluation import evaluate_everywhere
from payload.trainer.heldout import HeldOut, measure
from payload.trainer.program import TargetProgram
from payload.trainer.run import Run
from payload.trainer.stopwatch import Stopwatch
from payload.trainer.transfer import Outbox, Supply


class TargetSide:
    """A rank's part as a target: produce what the plan asks for, and decode the held-out prompts.

    With a feature cache the features are read instead of computed.
    """

    def __init__(
        self,
        run: Run,
        program: TargetProgram,
        rows: PackedRows,
        held_out: HeldOut,
        cache: FeatureCache | None = None,
    ) -> None:
        self._run = run
        self._program = program
        self._rows = rows
        self._held_out = held_out
        self._cache = cache
        self.outbox = Outbox(run.ranks.rank, run.groups.links, run.ranks.device, run.recipe.train.prefetch)
        self.features_time = Stopwatch(run.ranks.device)
        self.data_wait_s = 0.0
        self._has_compiled = False

    def produce(self, micro_batch: int) -> Supply:
        """The supply of one micro-batch, on this rank's device."""
        started = time.monotonic()
        numbers = self._rows.row_numbers(micro_batch)
        batch = self._rows.gather(numbers).to(self._run.ranks.device)
        cached = self._read_features(self._cache, numbers) if self._cache is not None else None
        self.data_wait_s += time.monotonic() - started
        if cached is not None:
            return Supply(batch, *cached)
        with self.features_time.measured():
            supply = self._program.produce(batch)
        self._has_compiled = True
        return supply

    def compile(self) -> None:
        """Have the features' functions compiled if they are not yet: this rank's share may begin with a later step."""
        if self._cache is None and not self._has_compiled:
            self._program.produce(self._rows.batch(0).to(self._run.ranks.device))
            self._has_compiled = True

    def _read_features(
        self, cache: FeatureCache, numbers: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _, features, *rest = self._run.shape.buffers(self._run.ranks.device)
        teacher = rest[0] if rest else None
        # Rows that only fill up the batch have features of 0, and no document that could see them.
        features[len(numbers) :] = 0
        for slot, number in enumerate(numbers):
            of_row, teacher_of_row = cache.read(number)
            features[slot] = of_row.to(features.device)
            if teacher is not None and teacher_of_row is not None:
                teacher[slot] = teacher_of_row.to(teacher.device)
        if teacher is not None:
            teacher[len(numbers) :] = 0
        return features, teacher

    def evaluate(self, state: dict[str, torch.Tensor], compare_plain: bool) -> Acceptance | None:
        """Held-out acceptance of a drafter's state, None when a stop cut it short; a collective of the targets."""
        target = self._program.target
        with torch.device("meta"):
            drafter = DFlashDrafter(self._run.config).eval()
        drafter.load_state_dict(state, assign=True)
        return measure(
            target,
            drafter,
            self._held_out,
            self._run.recipe.train.eval_max_new_tokens,
            self._run.groups.targets,
            compare_plain,
            should_stop=lambda: self._run.stop.received,
        )


def run_target(run: Run, side: TargetSide) -> None:
    """The life of a rank that is a target alone."""
    rank = run.ranks.rank
    if run.evaluates and run.first_step == 1:
        evaluate_everywhere(run, side, None, compare_plain=False)
    step = run.first_step
    while run.pace.await_turn(step):
        _ = run.stop.received
        for number in run.roles.produced_by(rank, step):
            side.outbox.send(side.produce(number), run.roles.consumer(number))
        if run.evaluates_after(step):
            side.outbox.flush()
            evaluate_everywhere(run, side, None, compare_plain=step == run.recipe.train.steps)
        step += 1
    side.outbox.flush()
