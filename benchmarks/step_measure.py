"""Measuring one training step on a GPU: time by events, waits for the device, memory, kernels by group, the ceiling."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from payload.drafter import step as drafter_step
from payload.trainer.program import DrafterProgram
from payload.trainer.transfer import Supply

LR = 1e-4
_PRODUCTS = ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitK", "triton_tem_fused_mm", "triton_mm")


@dataclass(frozen=True)
class Timing:
    """Milliseconds of single steps, and the peak of allocated memory over them (GiB)."""

    median_ms: float
    least_ms: float
    greatest_ms: float
    peak_gib: float


def one_step(program: DrafterProgram, supply: Supply, micro_batch: int) -> torch.Tensor:
    """Forward, backward and update, as training does them; returns the micro-batch's sums."""
    totals = program.accumulate(supply, micro_batch, last=True)
    program.update(totals, LR)
    return totals


def time_steps(step: Callable[[int], Any], steps: int, warm_s: float) -> Timing:
    """Median of ``steps`` steps after ``warm_s`` seconds of them: a chip at rest is faster than one at work."""
    torch.cuda.synchronize()
    number, until = 0, time.monotonic() + warm_s
    while number < 2 or time.monotonic() < until:
        step(number)
        torch.cuda.synchronize()
        number += 1
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step(number)
        mark.record()
        number += 1
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in pairwise(marks)]
    return Timing(statistics.median(times), min(times), max(times), torch.cuda.max_memory_allocated() / 2**30)


def assert_never_waits(step: Callable[[int], Any]) -> None:
    """Raises RuntimeError where a step waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def matmul_ceiling(seconds: float = 2.0, size: int = 8192) -> float:
    """FLOP/s of a bf16 product of random matrices, sustained: the median of the last half of ``seconds``."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    times = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(8):
            torch.mm(a, b, out=out)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 8e3)
    return float(2 * size**3 / statistics.median(times[len(times) // 2 :]))


def kernel_groups(step: Callable[[int], Any], steps: int = 2) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of kernels a step by group, and those of the 25 longest kernels by name.

    Groups: ``attention`` (flex_attention's kernels), ``head`` (all that the head and its loss launch in the forward
    pass), ``linear`` (other matrix products), ``optimizer`` (all of the update), ``rest``.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with _named_head(), torch.profiler.profile(activities=activities) as profiler:
        for number in range(steps):
            step(number)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    return _grouped([event for event in events if event.get("ph") == "X"], steps)


def _grouped(events: list[dict[str, Any]], steps: int) -> tuple[dict[str, float], dict[str, float]]:
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    ranges = [
        (event["tid"], event["ts"], event["ts"] + event["dur"], event["name"].removeprefix("bench:"))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("bench:")
    ]
    groups: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        launch = launches.get(event.get("args", {}).get("correlation"))
        inside = [
            name
            for thread, start, end, name in ranges
            if launch is not None and launch["tid"] == thread and start <= launch["ts"] < end
        ]
        group = inside[0] if inside else _group_of(event["name"])
        groups[group] += event["dur"] / 1e3 / steps
        names[f"{group}: {event['name'][:90]}"] += event["dur"] / 1e3 / steps
    longest = sorted(names.items(), key=lambda item: -item[1])[:25]
    return dict(sorted(groups.items())), dict(longest)


def _group_of(kernel: str) -> str:
    if "flex_attention" in kernel:
        return "attention"
    return "linear" if any(part in kernel for part in _PRODUCTS) else "rest"


@contextmanager
def _named_head() -> Iterator[None]:
    """Names what the head and the update launch for `kernel_groups`."""
    loss, update = drafter_step.draft_loss, DrafterProgram.update

    def named_loss(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function("bench:head"):
            return loss(*args, **kwargs)

    def named_update(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function("bench:optimizer"):
            return update(*args, **kwargs)

    with (
        mock.patch.object(drafter_step, "draft_loss", named_loss),
        mock.patch.object(DrafterProgram, "update", named_update),
    ):
        yield
