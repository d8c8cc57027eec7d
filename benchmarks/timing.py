"""How long something takes on a device, what of it a matrix product would take, and how much memory it needs."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds of repeated runs: their median, and the fastest and slowest."""

    median_ms: float
    fastest_ms: float
    slowest_ms: float


def timed(work: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 2) -> Timing:
    """Times each of ``repeats`` runs, after ``warm_up`` that are not counted.

    On a GPU by events around each run: what the device does, with the host running ahead as in training.
    """
    for _ in range(warm_up):
        work()
    if device.type != "cuda":
        taken = []
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            taken.append(1000 * (time.perf_counter() - began))
        return _timing(taken)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return _timing([before.elapsed_time(after) for before, after in itertools.pairwise(marks)])


def _timing(taken_ms: list[float]) -> Timing:
    return Timing(statistics.median(taken_ms), min(taken_ms), max(taken_ms))


def matmul_ceiling(device: torch.device) -> float:
    """FLOP/s of a large square matrix product of random numbers, sustained: bf16 on a GPU, fp32 on a CPU."""
    size, repeats = (8192, 1000) if device.type == "cuda" else (256, 5)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device=device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    return 2 * size**3 / (timed(lambda: left @ right, device, repeats).median_ms / 1000)


def peak_memory(work: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that a run holds at its peak beyond what was held before it; None where nobody counts (a CPU)."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def longest_kernels(work: Callable[[], object], count: int = 16) -> dict[str, float]:
    """Milliseconds of a run's longest kernels on the GPU, by name; empty on a CPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    on_gpu = [
        event for event in profiler.key_averages() if event.device_type != torch.autograd.DeviceType.CPU
    ]
    longest = sorted(on_gpu, key=lambda event: -event.self_device_time_total)[:count]
    return {event.key[:100]: event.self_device_time_total / 1000 for event in longest}


def device_name(device: torch.device) -> str:
    """The GPU's name, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
