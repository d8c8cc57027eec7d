"""A rank's part as a drafter: consume, update, and on the lead measure, report and keep checkpoints."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from payload.compile.first_step import FirstStepWatch
from payload.compile.guard import install
from payload.drafter.card import model_card
from payload.trainer.checkpoint import Progress, Snapshot, drop_old_checkpoints, write_checkpoint
from payload.trainer.checkpoint_writer import CheckpointWriter
from payload.trainer.evaluation import evaluate_everywhere
from payload.trainer.metrics import Totals
from payload.trainer.program import DrafterProgram
from payload.trainer.ranks import say
from payload.trainer.reporting import Interval, RunReport, tokens_per_micro_batch
from payload.trainer.run import Run
from payload.trainer.schedule import learning_rate
from payload.trainer.supplies import Supplies
from payload.trainer.target_side import TargetSide


class DrafterSide:
    """The steps of one drafter. ``report`` is the lead's; the other drafters have none."""

    def __init__(
        self,
        run: Run,
        program: DrafterProgram,
        target_side: TargetSide | None,
        progress: Progress,
        writer: CheckpointWriter,
        report: RunReport | None,
    ) -> None:
        self._run = run
        self._program = program
        self._target_side = target_side
        self._report = report
        self._supplies = Supplies(run, target_side)
        self._since: torch.Tensor | None = None
        self._norms: list[torch.Tensor] = []
        self._since_time = time.monotonic()
        self._watch: FirstStepWatch | None = None
        self._writer = writer
        self._copy: Snapshot | None = None
        self.progress = progress

    def run(self) -> Progress:
        """All steps from the first to the last; returns where the run stands."""
        run, train = self._run, self._run.recipe.train
        if run.evaluates and run.first_step == 1:
            self._evaluate(0)
        step = run.first_step
        self._since_time = time.monotonic()
        while self._may_begin(step):
            if step == run.first_step:
                self._first_step(step)
            else:
                self._later_step(step)
            self.progress = replace(self.progress, step=step, accepted=None)
            if self._report is not None:
                if run.stop.anywhere() and run.pace.end_soon(step):
                    say(f"stopping: told to; the last step will be {run.pace.last_step}")
                run.pace.announce(step)
            keeps = step % train.checkpoint_every == 0 or step == run.pace.last_step
            evaluates = run.evaluates_after(step)
            # What a checkpoint knows of the run must be up to date, so that a resumed run counts on from it.
            if keeps or evaluates or step % train.log_every == 0 or step == run.first_step:
                self._sum_up(step)
            if evaluates:
                keeps = self._evaluate(step) or keeps
            if keeps:
                self._checkpoint()
            step += 1
        if self._target_side is not None:
            self._target_side.outbox.flush()
        self._writer.finish()
        return self.progress

    def _may_begin(self, step: int) -> bool:
        if self._report is not None:
            return step <= self._run.pace.last_step
        return self._run.pace.await_turn(step)

    def _first_step(self, step: int) -> None:
        """A step in which things may compile; afterwards nothing should, and by default nothing can."""
        guard = install()
        self._watch = FirstStepWatch(self._run.ranks.device.type)
        with guard.first_step():
            self._step(step)
            if self._target_side is not None:
                self._target_side.compile()
        report = self._watch.report()
        guard.seal(self._run.recipe.train.on_recompile)
        if self._report is not None:
            self._report.first_step(step, report)

    def _later_step(self, step: int) -> None:
        with install().steady():
            self._step(step)

    def _step(self, step: int) -> None:
        run = self._run
        _ = run.stop.received
        numbers = run.roles.consumed_by(run.ranks.rank, step)
        sums: torch.Tensor | None = None
        for number in numbers:
            # No name for the supply: it would keep it while the next one is made.
            of_one = self._program.accumulate(
                self._supplies.take(number, step), number, last=number == numbers[-1]
            )
            sums = of_one if sums is None else sums + of_one
        assert sums is not None
        if run.groups.drafters is not None:
            dist.all_reduce(sums, group=run.groups.drafters)
        rate = learning_rate(step, run.recipe.train.steps, run.recipe.optim)
        self._norms.append(self._program.update(sums, rate))
        self._since = sums if self._since is None else self._since + sums

    def _sum_up(self, step: int) -> None:
        """Read the sums since the last time, and report them on the lead. Waits for the device."""
        self._writer.check()
        assert self._since is not None
        totals = Totals.of(self._since, self._run.config.block_size)
        interval = Interval(
            totals=totals,
            seconds=time.monotonic() - self._since_time,
            gradient_norms=torch.stack(self._norms),
            transfer_wait_s=self._supplies.inbox.waited_s,
            data_wait_s=self._target_side.data_wait_s if self._target_side is not None else 0.0,
        )
        loss = totals.loss if math.isfinite(totals.loss) else None
        self.progress = replace(
            self.progress,
            tokens=self.progress.tokens + totals.micro_batches * tokens_per_micro_batch(self._run.recipe),
            first_loss=loss if self.progress.first_loss is None else self.progress.first_loss,
            last_loss=self.progress.last_loss if loss is None else loss,
        )
        compiled_late = self._watch.compiled_since() if self._watch is not None else None
        if self._report is not None:
            self._report.trained(step, interval, self.progress.tokens)
            if compiled_late is not None:
                self._report.compiled_late(step, compiled_late)
        self._since, self._norms, self._since_time = None, [], time.monotonic()

    def _evaluate(self, step: int) -> bool:
        """Decode the held-out prompts; true when the drafter is better than at any evaluation before."""
        final = step == self._run.recipe.train.steps
        result = evaluate_everywhere(self._run, self._target_side, self._program, compare_plain=final)
        self._since_time = time.monotonic()
        if result is None:
            return False
        accepted, best = result.mean_accepted_length, self.progress.best_accepted
        self.progress = replace(
            self.progress,
            accepted=accepted,
            accepted_before=accepted if step == 0 else self.progress.accepted_before,
            best_accepted=accepted if best is None else max(best, accepted),
        )
        if self._report is not None:
            self._report.evaluated(step, result)
        return best is not None and accepted > best

    def _checkpoint(self) -> None:
        run = self._run
        weights, optimizer = self._program.drafter.state_dict(), self._program.optimizer.state_tensors()
        newest = Snapshot(self.progress, weights, optimizer)
        if self._report is None:
            newest.help_to_copy()
            return
        card = model_card(
            run.config,
            run.recipe.to_dict(),
            run.data_facts,
            {
                "step": self.progress.step,
                "tokens": self.progress.tokens,
                "loss": self.progress.last_loss,
                "held_out_accepted_length": self.progress.accepted,
            },
        )
        checkpoints = run.run_dir / "checkpoints"
        # The copy before may still be written from, and its memory is used again.
        self._writer.finish()
        snapshot = self._copy = newest.copied(self._copy)

        def write() -> None:
            folder = write_checkpoint(checkpoints, snapshot, run.config, card)
            drop_old_checkpoints(checkpoints, run.recipe.train.keep_last)
            say(f"checkpoint: {folder.relative_to(run.run_dir)}")

        self._writer.begin(write)
        self._since_time = time.monotonic()
