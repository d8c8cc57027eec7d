"""What the lead drafter tells of a run: lines of metrics, lines for the person who reads the log, and the verdict."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from payload.acceptance import Acceptance
from payload.compile.counts import CompileCounts
from payload.compile.first_step import FirstStepReport, alarm_line
from payload.errors import PayloadError
from payload.recipe import Recipe
from payload.trainer.checkpoint import Progress
from payload.trainer.failure import EXIT_FAILED, EXIT_STOPPED
from payload.trainer.metrics import MetricsLog, Totals, drafter_step_flops, peak_flops
from payload.trainer.ranks import say
from payload.trainer.run import Run
from payload.trainer.schedule import learning_rate

_IMPROVED_RATIO = 1.5
"""How far the accepted length must rise above its start for ``train.assert_improves``."""

_SLOW_RATIO = 4.0
"""How much longer than the run's fastest a step takes when something is wrong: no batch makes such a difference."""
_SLOW_FOR_S = 30.0
"""For how long they must, before it is an alarm."""

_BARREN_STEPS = 10
"""One strange document is no reason to end a run; so many steps in a row that change no weight are."""


@dataclass(frozen=True)
class Interval:
    """What happened since the last report, over all drafters. The waits are sums since the run's start."""

    totals: Totals
    seconds: float
    gradient_norms: torch.Tensor
    """Of each step, before clipping; not finite where the step changed no weight."""
    transfer_wait_s: float
    data_wait_s: float


class Speed:
    """Watches how long steps take, against the fastest of the run."""

    def __init__(self) -> None:
        self.fastest_step_s = math.inf
        self._slow_s = 0.0
        self._alarmed = False
        self._waited = (0.0, 0.0)

    def after(self, steps: int, interval: Interval) -> str | None:
        """A line for the log when steps have become slow, and one when they are not any more; else None."""
        step_s = interval.seconds / steps
        waits = (interval.transfer_wait_s, interval.data_wait_s)
        transfer_s, data_s = (now - before for now, before in zip(waits, self._waited, strict=True))
        self._waited = waits
        self.fastest_step_s = min(self.fastest_step_s, step_s)
        if step_s < _SLOW_RATIO * self.fastest_step_s:
            over, self._slow_s, self._alarmed = self._alarmed, 0.0, False
            return f"steps take {step_s:.2f} s again" if over else None
        self._slow_s += interval.seconds
        if self._alarmed or self._slow_s < _SLOW_FOR_S:
            return None
        self._alarmed = True
        if transfer_s > interval.seconds / 2:
            why = "They wait for features: see the targets' GPUs and the link (nvidia-smi topo -m)"
        elif data_s > interval.seconds / 2:
            why = "They wait for rows or stored features: see the disk"
        else:
            why = "Something else may use the GPUs or the cores, or they are throttled: make doctor, nvidia-smi -q"
        times = step_s / self.fastest_step_s
        return f"ALARM: steps take {step_s:.2f} s, {times:.0f} x as long as this run's fastest. {why}."


class RunReport:
    """Writes to the metrics and to the log, from the run's start to its end."""

    def __init__(self, run: Run, log: MetricsLog) -> None:
        self._run = run
        self._log = log
        self._flops = drafter_step_flops(run.recipe, run.config)
        self._peak = peak_flops(run.ranks.device)
        self._barren_steps = 0
        self._speed = Speed()

    def started(self, drafter_parameters: int) -> None:
        """The run begins, or goes on, with a drafter of so many weights."""
        run = self._run
        layers = ", ".join(map(str, run.config.target_layer_ids))
        say(
            f"drafter: {drafter_parameters:,} weights, block {run.config.block_size}, "
            f"features of target layers {layers}"
        )
        done = run.first_step - 1
        if done > 0:
            say(f"resuming after step {done}")
        self._log.write(
            "start",
            done,
            steps=run.recipe.train.steps,
            drafter_parameters=drafter_parameters,
            **run.data_facts,
        )

    def first_step(self, step: int, report: FirstStepReport) -> None:
        """What the first step compiled and how long it took."""
        say(report.line())
        self._log.write("first_step", step, **report.to_dict())

    def compiled_late(self, step: int, counts: CompileCounts) -> None:
        """Something was compiled since the last report, when everything should have been."""
        say(alarm_line(counts))
        self._log.write("compiled_late", step, **asdict(counts))

    def trained(self, step: int, interval: Interval, tokens_seen: int) -> None:
        """The steps up to ``step``. Raises ``PayloadError`` when too many of them in a row have changed no weight."""
        recipe, totals, seconds = self._run.recipe, interval.totals, interval.seconds
        norms: list[float] = interval.gradient_norms.tolist()
        learned = [math.isfinite(norm) for norm in norms]
        blocks = recipe.train.batch_size * recipe.train.num_anchors
        tokens = totals.micro_batches * tokens_per_micro_batch(recipe)
        drafted = totals.micro_batches * blocks * self._run.config.block_size
        flops = totals.micro_batches * self._flops / seconds / len(self._run.roles.drafters)
        lr = learning_rate(step, recipe.train.steps, recipe.optim)
        self._log.write(
            "train",
            step,
            loss=totals.loss,
            accuracy=totals.accuracy,
            accuracy_by_position=totals.accuracy_by_position,
            simulated_accepted_length=totals.simulated_accepted_length,
            learning_rate=lr,
            gradient_norm=norms[-1],
            tokens_per_s=tokens / seconds,
            draft_tokens_per_s=drafted / seconds,
            step_s=seconds / len(norms),
            tflops_per_s=flops / 1e12,
            mfu=flops / self._peak if self._peak else None,
            transfer_wait_s=interval.transfer_wait_s,
            data_wait_s=interval.data_wait_s,
            memory_bytes=_peak_memory(self._run.ranks.device),
            skipped_micro_batches=totals.skipped,
            skipped_updates=learned.count(False),
            tokens_seen=tokens_seen,
        )
        say(
            f"step {step}/{recipe.train.steps}  loss {totals.loss:.3f}  accuracy {totals.accuracy:.3f}  "
            f"accepted (simulated) {totals.simulated_accepted_length:.2f}  lr {lr:.1e}  "
            f"{tokens / seconds / 1e3:.1f} Ktok/s"
        )
        if step > self._run.first_step:
            self._watch_speed(step, len(norms), interval)
        if totals.skipped:
            share = f"{totals.skipped} of {totals.micro_batches} micro-batches"
            say(f"warning: {share} had features or a loss that are not finite, and did not count")
        if not all(learned):
            steps = f"{learned.count(False)} of {len(learned)} steps"
            say(f"warning: {steps} changed no weight: {_why_barren(totals)}")
        since_one_learned = [*reversed(learned), True].index(True)
        self._barren_steps = since_one_learned + (0 if any(learned) else self._barren_steps)
        whole_run = step == recipe.train.steps and self._barren_steps == step - self._run.first_step + 1
        if self._barren_steps >= _BARREN_STEPS or whole_run:
            raise PayloadError(
                f"The last {self._barren_steps} steps changed no weight: {_why_barren(totals)}.",
                hint="Check the target's weights and dtype (float16 overflows where bfloat16 does not), optim.lr, and "
                "that the training data is supervised.",
            )

    def _watch_speed(self, step: int, steps: int, interval: Interval) -> None:
        found = self._speed.after(steps, interval)
        if found is not None:
            say(found)
            step_s = interval.seconds / steps
            self._log.write("speed", step, step_s=step_s, fastest_step_s=self._speed.fastest_step_s)

    def evaluated(self, step: int, result: Acceptance) -> None:
        """What decoding the held-out prompts after ``step`` gave."""
        self._log.write(
            "eval",
            step,
            accepted_length=result.mean_accepted_length,
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
            f"held-out after step {step}: accepted length {result.mean_accepted_length:.2f} "
            f"({result.prompts} prompts{against})"
        )

    def ended(self, progress: Progress) -> int:
        """The run is over; returns its exit status."""
        steps = self._run.recipe.train.steps
        if progress.step < steps:
            self._log.write("end", progress.step, outcome="stopped")
            say(f"stopped after step {progress.step} of {steps}; the checkpoint of this step resumes the run")
            return EXIT_STOPPED
        status, verdict = judge(self._run.recipe, progress)
        self._log.write(
            "end",
            progress.step,
            outcome="finished" if status == 0 else "failed",
            first_loss=progress.first_loss,
            last_loss=progress.last_loss,
            accepted_before=progress.accepted_before,
            accepted_after=progress.accepted,
            verdict=verdict,
        )
        say(verdict)
        return status


def tokens_per_micro_batch(recipe: Recipe) -> int:
    """Context tokens of one micro-batch, padding included: its shape is static."""
    return recipe.train.batch_size * recipe.data.max_length


def judge(recipe: Recipe, ended: Progress) -> tuple[int, str]:
    """Exit status and last line of a run that went through all its steps."""
    first, last = (math.nan if loss is None else loss for loss in (ended.first_loss, ended.last_loss))
    loss = f"loss {first:.3f} -> {last:.3f}"
    if ended.accepted is None or ended.accepted_before is None:
        return 0, f"finished: {loss}"
    accepted = f"held-out accepted length {ended.accepted_before:.2f} -> {ended.accepted:.2f}"
    improved = (
        ended.first_loss is not None
        and ended.last_loss is not None
        and ended.last_loss < ended.first_loss
        and ended.accepted >= max(1.0, _IMPROVED_RATIO * ended.accepted_before)
    )
    if not recipe.train.assert_improves:
        return 0, f"finished: {loss}, {accepted}"
    if improved:
        return 0, f"finished: improved: {loss}, {accepted}"
    verdict = f"failed: no clear improvement: {loss}, {accepted}"
    return EXIT_FAILED, f"{verdict} (train.assert_improves asks for one; false lets such a run finish)"


def _why_barren(totals: Totals) -> str:
    if totals.skipped == totals.micro_batches:
        return "none of their features or losses were finite"
    if totals.weight_sum == 0:
        return "nothing in them counted"
    return "their gradients were not finite"


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
