"""The steps of a run, as a target and as a drafter lives them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from payload.compile.first_step import FirstStepWatch
from payload.compile.guard import install
from payload.data.feature_cache import FeatureCache
from payload.data.prepared import PackedRows
from payload.decode import Acceptance
from payload.drafter.card import model_card
from payload.drafter.checkpoint import tensor_shapes
from payload.drafter.config import DrafterConfig
from payload.drafter.model import DFlashDrafter
from payload.errors import PayloadError
from payload.recipe import Recipe
from payload.trainer.checkpoint import Progress, Snapshot, drop_old_checkpoints, write_checkpoint
from payload.trainer.heldout import HeldOut, measure
from payload.trainer.metrics import MetricsLog, Totals, drafter_step_flops, peak_flops
from payload.trainer.program import DrafterProgram, TargetProgram
from payload.trainer.ranks import Pace, Ranks, StopSignal, say
from payload.trainer.roles import Roles
from payload.trainer.schedule import learning_rate
from payload.trainer.transfer import Inbox, Outbox, Supply, SupplyShape


@dataclass(frozen=True)
class Groups:
    """Process groups; None where a group would have one member. ``evaluation``: the lead drafter and the targets."""

    drafters: dist.ProcessGroup | None
    targets: dist.ProcessGroup | None
    evaluation: dist.ProcessGroup | None


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
        self.outbox = Outbox(run.recipe.train.prefetch)
        self.data_wait_s = 0.0

    def produce(self, micro_batch: int) -> Supply:
        """The supply of one micro-batch, on this rank's device."""
        started = time.monotonic()
        numbers = self._rows.row_numbers(micro_batch)
        batch = self._rows.gather(numbers).to(self._run.ranks.device)
        cached = self._read_features(self._cache, numbers) if self._cache is not None else None
        self.data_wait_s += time.monotonic() - started
        return self._program.produce(batch) if cached is None else Supply(batch, *cached)

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

    def evaluate(self, state: dict[str, torch.Tensor], compare_plain: bool) -> Acceptance:
        """Held-out acceptance of a drafter's state; a collective of the targets."""
        target = self._program.target
        drafter = DFlashDrafter(self._run.config).to(target.device, target.dtype).eval()
        drafter.load_state_dict(state)
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


def evaluate_everywhere(
    run: Run, side: TargetSide | None, program: DrafterProgram | None, compare_plain: bool
) -> Acceptance | None:
    """Bring the drafter's weights to the targets, decode there, and bring the result to the lead drafter.

    Called by all ranks; returns the result on targets and on the lead drafter.
    """
    state = program.full_state() if program is not None else {}
    lead = run.ranks.rank == run.roles.lead_drafter
    if side is None and not lead:
        return None
    sent = {
        name: state[name].to(run.ranks.device, run.shape.dtype)
        if lead
        else torch.empty(shape, device=run.ranks.device, dtype=run.shape.dtype)
        for name, shape in tensor_shapes(run.config).items()
    }
    if run.groups.evaluation is not None:
        for tensor in sent.values():
            dist.broadcast(tensor, src=run.roles.lead_drafter, group=run.groups.evaluation)
    result = side.evaluate(sent, compare_plain) if side is not None else None
    if run.groups.evaluation is not None:
        box = [result]
        dist.broadcast_object_list(
            box, src=run.roles.lead_target, group=run.groups.evaluation, device=torch.device("cpu")
        )
        result = box[0]
    return result


class Supplies:
    """A drafter's supplies in the order of its micro-batches, whether they are made here or elsewhere."""

    def __init__(self, run: Run, side: TargetSide | None) -> None:
        self._run = run
        self._side = side
        self._made_here: dict[int, Supply] = {}
        self.inbox = Inbox(run.shape, run.ranks.device, run.recipe.train.prefetch)
        self._expected_up_to = -1

    def begin_step(self, step: int) -> None:
        """Produce this rank's share of a step, for itself and others, before anything of the step is consumed."""
        rank, roles = self._run.ranks.rank, self._run.roles
        if self._side is None:
            return
        for number in roles.produced_by(rank, step):
            supply = self._side.produce(number)
            if roles.consumer(number) == rank:
                self._made_here[number] = supply
            else:
                self._side.outbox.send(supply, roles.consumer(number))

    def take(self, micro_batch: int, step: int) -> Supply:
        """The supply of this rank's next micro-batch, which belongs to ``step``."""
        self._expect_ahead(step)
        made = self._made_here.pop(micro_batch, None)
        return made if made is not None else self.inbox.take()

    def _expect_ahead(self, step: int) -> None:
        """Post receives for this step and the next, as far as there is room; further than that the run may end."""
        rank, roles = self._run.ranks.rank, self._run.roles
        for ahead in range(step, min(step + 1, self._run.pace.last_step) + 1):
            for number in roles.consumed_by(rank, ahead):
                if number <= self._expected_up_to or roles.producer(number) == rank:
                    continue
                if not self.inbox.has_room:
                    return
                self.inbox.expect(roles.producer(number))
                self._expected_up_to = number


class DrafterSide:
    """A rank's part as a drafter: consume, update, and on the lead measure, log and keep checkpoints."""

    def __init__(
        self,
        run: Run,
        program: DrafterProgram,
        target_side: TargetSide | None,
        progress: Progress,
        log: MetricsLog | None,
    ) -> None:
        self._run = run
        self._program = program
        self._target_side = target_side
        self._log = log
        self._supplies = Supplies(run, target_side)
        self._flops = drafter_step_flops(run.recipe, run.config)
        self._peak = peak_flops(run.ranks.device)
        self._since: torch.Tensor | None = None
        self._since_steps = 0
        self._since_time = time.monotonic()
        self.progress = progress

    @property
    def is_lead(self) -> bool:
        return self._run.ranks.rank == self._run.roles.lead_drafter

    def run(self) -> Progress:
        """All steps from the first to the last; returns where the run stands."""
        run, train = self._run, self._run.recipe.train
        if run.evaluates and run.first_step == 1:
            self._evaluate(0)
        step = run.first_step
        self._since_time = time.monotonic()
        while self._may_begin(step):
            norm = self._first_step(step) if step == run.first_step else self._later_step(step)
            self.progress = replace(self.progress, step=step, accepted=None)
            if self.is_lead:
                if run.stop.anywhere() and run.pace.end_soon(step):
                    say(f"stopping: told to; the last step will be {run.pace.last_step}")
                run.pace.announce(step)
            if step % train.log_every == 0 or step in (run.first_step, run.pace.last_step):
                self._report(step, norm)
            if run.evaluates_after(step):
                self._evaluate(step)
            if step % train.checkpoint_every == 0 or step == run.pace.last_step:
                self._checkpoint()
            step += 1
        if self._target_side is not None:
            self._target_side.outbox.flush()
        return self.progress

    def _may_begin(self, step: int) -> bool:
        return step <= self._run.pace.last_step if self.is_lead else self._run.pace.await_turn(step)

    def _first_step(self, step: int) -> torch.Tensor:
        """A step in which things may compile; afterwards nothing may."""
        guard = install()
        watch = FirstStepWatch(self._run.ranks.device.type)
        with guard.first_step():
            norm = self._step(step)
        report = watch.report()
        guard.seal()
        if self.is_lead and self._log is not None:
            say(report.line())
            self._log.write("first_step", step, **report.to_dict())
        return norm

    def _later_step(self, step: int) -> torch.Tensor:
        with install().steady():
            return self._step(step)

    def _step(self, step: int) -> torch.Tensor:
        run = self._run
        _ = run.stop.received
        self._supplies.begin_step(step)
        numbers = run.roles.consumed_by(run.ranks.rank, step)
        sums: torch.Tensor | None = None
        for number in numbers:
            supply = self._supplies.take(number, step)
            of_one = self._program.accumulate(supply, number, last=number == numbers[-1])
            sums = of_one if sums is None else sums + of_one
        assert sums is not None
        if run.groups.drafters is not None:
            dist.all_reduce(sums, group=run.groups.drafters)
        norm = self._program.update(sums, learning_rate(step, run.recipe.train.steps, run.recipe.optim))
        self._since = sums if self._since is None else self._since + sums
        self._since_steps += 1
        return norm

    def _report(self, step: int, norm: torch.Tensor) -> None:
        """Read the sums since the last report; on the lead, write them down. Waits for the device."""
        run, recipe = self._run, self._run.recipe
        assert self._since is not None
        totals = Totals.of(self._since, run.config.block_size)
        seconds = time.monotonic() - self._since_time
        per_batch = recipe.train.batch_size * recipe.data.max_length
        drafted = recipe.train.batch_size * recipe.train.num_anchors * run.config.block_size
        tokens = totals.micro_batches * per_batch
        flops = totals.micro_batches * self._flops / seconds / len(run.roles.drafters)
        self.progress = replace(
            self.progress,
            tokens=self.progress.tokens + tokens,
            first_loss=totals.loss if self.progress.first_loss is None else self.progress.first_loss,
            last_loss=totals.loss,
        )
        if self.is_lead and self._log is not None:
            lr = learning_rate(step, recipe.train.steps, recipe.optim)
            self._log.write(
                "train",
                step,
                loss=totals.loss,
                accuracy=totals.accuracy,
                accuracy_by_position=totals.accuracy_by_position,
                simulated_accepted_length=totals.simulated_accepted_length,
                learning_rate=lr,
                gradient_norm=float(norm),
                tokens_per_s=tokens / seconds,
                draft_tokens_per_s=totals.micro_batches * drafted / seconds,
                step_s=seconds / self._since_steps,
                tflops_per_s=flops / 1e12,
                mfu=flops / self._peak if self._peak else None,
                transfer_wait_s=self._supplies.inbox.waited_s,
                data_wait_s=self._target_side.data_wait_s if self._target_side is not None else 0.0,
                memory_bytes=_peak_memory(run.ranks.device),
                skipped_micro_batches=totals.skipped,
                tokens_seen=self.progress.tokens,
            )
            say(
                f"step {step}/{recipe.train.steps}  loss {totals.loss:.3f}  accuracy {totals.accuracy:.3f}  "
                f"accepted (simulated) {totals.simulated_accepted_length:.2f}  lr {lr:.1e}  "
                f"{tokens / seconds / 1e3:.1f} Ktok/s"
            )
            if totals.skipped:
                share = f"{totals.skipped} of {totals.micro_batches} micro-batches"
                say(f"warning: {share} had features that are not finite and did not count")
            if totals.skipped == totals.micro_batches:
                raise PayloadError(
                    f"No features of the last {self._since_steps} steps were finite.",
                    hint="Check the target's weights and dtype; float16 overflows where bfloat16 does not.",
                )
        self._since, self._since_steps, self._since_time = None, 0, time.monotonic()

    def _evaluate(self, step: int) -> None:
        run = self._run
        final = step == run.recipe.train.steps
        result = evaluate_everywhere(run, self._target_side, self._program, compare_plain=final)
        if result is None:
            self._since_time = time.monotonic()
            return
        accepted = result.mean_accepted_length
        best = self.progress.best_accepted
        self.progress = replace(
            self.progress,
            accepted=accepted,
            accepted_before=accepted if step == 0 else self.progress.accepted_before,
            best_accepted=accepted if best is None else max(best, accepted),
        )
        if self.is_lead and self._log is not None:
            self._log.write(
                "eval",
                step,
                accepted_length=accepted,
                accepted_by_position=list(result.by_position),
                prompts=result.prompts,
                tokens=result.tokens,
                target_forwards=result.target_forwards,
                seconds=result.seconds,
                speedup=result.speedup,
                identical=result.identical,
            )
            against = ""
            if result.speedup is not None:
                against = f", {result.speedup:.2f} x plain decoding's speed"
            if result.identical is not None:
                against += f", {result.identical} of {result.prompts} texts identical to the target's own"
            say(
                f"held-out after step {step}: accepted length {accepted:.2f} ({result.prompts} prompts{against})"
            )
        self._since_time = time.monotonic()

    def _checkpoint(self) -> None:
        run = self._run
        weights = self._program.full_state()
        optimizer = self._program.optimizer.state_tensors()
        if not self.is_lead:
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
        folder = write_checkpoint(checkpoints, Snapshot(self.progress, weights, optimizer), run.config, card)
        drop_old_checkpoints(checkpoints, run.recipe.train.keep_last)
        say(f"checkpoint: {folder.relative_to(run.run_dir)}")
        self._since_time = time.monotonic()


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
