"""The trainer's side of the compile cache: refuse a cold start, report the first step, notice what compiles later.

In the trainer::

    require_warm(spec, device, cold_ok=arguments.cold_ok)   # before anything is built
    guard = install()
    watch = FirstStepWatch(device)
    with guard.first_step():
        step()                                              # forward, backward and optimizer
    log(watch.report().line())
    guard.seal()
    ...
    late = watch.compiled_since()                           # at every log interval; None when all is well
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.compile.cache import CacheDir, Manifest, read_manifest
from payload.compile.counts import CompileCounts, read_counts
from payload.compile.fingerprint import collect_facts
from payload.compile.policy import decide
from payload.errors import PayloadError


def attention_name(device: str) -> str:
    """The attention kernel that training uses on ``cuda`` or ``cpu``, as a person would name it."""
    from payload.drafter.attention import kernel_for

    if kernel_for(device) == "flex":
        return "flex_attention, compiled to Triton kernels"
    return f"dense scaled_dot_product_attention on the {device} (flex_attention has no backward pass there)"


def require_warm(spec: Mapping[str, Any], device: str, cold_ok: bool = False) -> Manifest | None:
    """Refuse to train with a cold compile cache.

    ``spec`` is the run's spec.json (its ``recipe`` and ``cache`` are read), ``device`` is ``cuda`` or ``cpu``. The
    cache looked at is the one that this process will use: the parent of ``TORCHINDUCTOR_CACHE_DIR``. Returns its
    manifest, or None where nothing is compiled or ``cold_ok`` lets a cold start pass. Raises PayloadError (kind
    ``refused``) when the cache is missing, another one than this build, device and recipe need, or not warm.
    """
    recipe = spec["recipe"]
    if not decide(recipe.get("compile", "auto"), device).compiled:
        return None
    try:
        return _warm_manifest(spec, device)
    except PayloadError:
        if cold_ok:
            return None
        raise


def _warm_manifest(spec: Mapping[str, Any], device: str) -> Manifest:
    hint = "Run warmup, then train again; --cold-ok starts all the same and compiles in the first step."
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None or not spec.get("cache"):
        raise PayloadError("this run has no compile cache", hint, kind="refused")
    cache = CacheDir(Path(folder).parent)
    needed = collect_facts(spec["recipe"], device)
    if cache.fingerprint != spec["cache"] or cache.fingerprint != needed.fingerprint:
        raise PayloadError(
            f"the run is pinned to the compile cache {spec['cache']} and uses {cache.fingerprint}, but this torch "
            f"build, device, code and recipe need {needed.fingerprint}",
            hint,
            kind="refused",
        )
    manifest = read_manifest(cache)
    if manifest is None:
        raise PayloadError(f"the compile cache {cache.fingerprint} is cold", hint, kind="refused")
    return manifest


@dataclass(frozen=True)
class FirstStepReport:
    """What the first step cost and what its compilation did."""

    seconds: float
    counts: CompileCounts
    attention: str

    def to_dict(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        return {
            "seconds": self.seconds,
            "hits": self.counts.hits,
            "misses": self.counts.misses,
            "bypassed": self.counts.bypassed,
            "retraced": self.counts.retraced,
            "recompiles": self.counts.recompiles,
            "attention": self.attention,
        }

    def line(self) -> str:
        """For the log."""
        return (
            f"first step: {self.seconds:.1f} s; compile cache: {self.counts.hits} hits, {self.counts.misses} misses, "
            f"{self.counts.recompiles} recompiles; attention: {self.attention}"
        )


class FirstStepWatch:
    """Measures the first step from its own creation to :meth:`report`, and afterwards looks for compilations."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._began = time.monotonic()
        self._at_start = read_counts()
        self._seen = self._at_start

    def report(self) -> FirstStepReport:
        """Call once, right after the first step. On a GPU this waits for the device."""
        import torch

        if self._device == "cuda":
            torch.cuda.synchronize()
        self._seen = read_counts()
        return FirstStepReport(
            seconds=time.monotonic() - self._began,
            counts=self._seen.since(self._at_start),
            attention=attention_name(self._device),
        )

    def compiled_since(self) -> CompileCounts | None:
        """What was compiled since the last look, in any thread of this process; None when nothing was."""
        now = read_counts()
        new = now.since(self._seen)
        self._seen = now
        return new if new.compilations else None


def alarm_line(counts: CompileCounts) -> str:
    """For the log, when something was compiled after the first step."""
    return (
        f"ALARM: {counts.compilations} frames were compiled after the first step ({counts.recompiles} of them again, "
        f"{counts.misses} graphs not in the cache): shapes or code differ from what was warmed, and speed suffers. "
        "TORCH_LOGS=recompiles tells which guard failed."
    )
