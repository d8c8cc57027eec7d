"""From nothing to the first training step: cold, warmed, and on another container that gets the compiled artifact.

    python -m benchmarks.first_step [--shape qwen3-8b|tiny] [--device cuda|cpu] [--json]

The baseline is ``cold``: a job that compiles in its first step. Each figure comes from processes of their own.
``guard`` is the median step under the compile guard over that without it, on a small drafter in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.made_up import Shape, run_job, write_rows, write_target
from payload.agent.protocol import Request
from payload.compile.guard import install, remove
from payload.compile.race_scenarios import Setting, TinyDrafter
from payload.compile.warmup import warm_up
from payload.recipe import Recipe, recipe_from_dict

_TRAIN: dict[Shape, dict[str, Any]] = {
    "qwen3-8b": {"batch_size": 4, "num_anchors": 512, "length": 3072, "dtype": "bfloat16"},
    "tiny": {"batch_size": 2, "num_anchors": 16, "length": 256, "dtype": "float32"},
}
_STEPS = 3
_GUARD_ROUNDS = 4
_GUARD_STEPS = 40
_SETTLING_STEPS = 10


class _Silent:
    """Takes a warm-up's events and says them on stderr."""

    def progress(self, message: str, done: int | None = None, total: int | None = None) -> None:
        sys.stderr.write(f"  {message}\n")

    def note(self, message: str) -> None:
        sys.stderr.write(f"  note: {message}\n")


def recipe_of(shape: Shape, root: Path) -> Recipe:
    """A few steps of both roles on one rank, at ``shape``, on made-up rows below ``root``."""
    sizes = _TRAIN[shape]
    target = write_target(root / "target", shape)
    rows = write_rows(root / "data" / "train.jsonl", rows=16, tokens=sizes["length"])
    return recipe_from_dict(
        {
            "name": f"first-step-{shape}",
            "target": {"model": str(target), "dtype": sizes["dtype"], "random_weights": True},
            "drafter": {"num_layers": 5 if shape == "qwen3-8b" else 2, "mask_token_id": 3},
            "data": {"train": [str(rows)], "max_length": sizes["length"]},
            "train": {
                "steps": _STEPS,
                "batch_size": sizes["batch_size"],
                "num_anchors": sizes["num_anchors"],
                "log_every": 1,
                "checkpoint_every": 1000,
            },
        }
    )


def measure_first_steps(shape: Shape, device: str) -> dict[str, Any]:
    """Seconds, hits and misses of the three ways to a first step."""
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        base = Path(folder)
        recipe = recipe_of(shape, base)

        def warm(root: Path, artifact: str | None = None) -> dict[str, Any]:
            fields = {"recipe": recipe.to_dict(), "device": device, "artifact": artifact}
            return warm_up(Request("benchmark", str(root), fields), _Silent())  # type: ignore[arg-type]

        def train(root: Path, run_id: str, fingerprint: str | None) -> dict[str, Any]:
            began = time.time()
            job = run_job(root, recipe, run_id, fingerprint)
            first = job.lines("first_step")[0]
            later = [line["step_s"] for line in job.lines("train")[1:]]
            return {
                "first_step_s": first["seconds"],
                "from_process_start_s": first["time"] - began,
                "hits": first["hits"],
                "misses": first["misses"],
                "recompiles": first["recompiles"],
                "later_step_s": statistics.median(later),
            }

        here, elsewhere = base / "here", base / "elsewhere"
        cold = train(base / "cold", "cold", None)
        began = time.monotonic()
        warmed = warm(here)
        warm_up_s = time.monotonic() - began
        warmed_run = train(here, "warmed", warmed["fingerprint"])
        began = time.monotonic()
        carried = warm(elsewhere, warmed["artifact"]["path"])
        load_s = time.monotonic() - began
        shipped_run = train(elsewhere, "shipped", carried["fingerprint"])
        return {
            "cold": cold,
            "warmed": {"warm_up_s": warm_up_s, **warmed_run},
            "shipped": {
                "artifact_bytes": Path(warmed["artifact"]["path"]).stat().st_size,
                "load_s": load_s,
                "to_first_step_s": load_s + shipped_run["from_process_start_s"],
                **shipped_run,
            },
        }


def measure_guard(device: str) -> dict[str, float]:
    """Median milliseconds of a small drafter's step without and with the guard, in turns, in one process."""
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def step_ms(drafter: TinyDrafter, around: Callable[[], AbstractContextManager[None]]) -> float:
        wait()
        began = time.perf_counter()
        with around():
            drafter.step()
        wait()
        return 1000 * (time.perf_counter() - began)

    drafter = TinyDrafter(0, Setting(None, device, 1))
    guarded: list[float] = []
    plain: list[float] = []
    drafter.step()
    for _ in range(_GUARD_ROUNDS):
        guard = install()
        try:
            with guard.first_step():
                drafter.step()
            guard.seal()
            of_round = [step_ms(drafter, guard.steady) for _ in range(_GUARD_STEPS)]
        finally:
            remove()
        guarded += of_round[_SETTLING_STEPS:]
        of_round = [step_ms(drafter, nullcontext) for _ in range(_GUARD_STEPS)]
        plain += of_round[_SETTLING_STEPS:]
    return {"plain_ms": statistics.median(plain), "guarded_ms": statistics.median(guarded)}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=list(_TRAIN), help="qwen3-8b on a GPU, else tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU when there is one")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)

    import torch

    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shape: Shape = given.shape or ("qwen3-8b" if device == "cuda" else "tiny")
    found = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "shape": shape,
        **measure_first_steps(shape, device),
        "guard": measure_guard(device),
    }
    if given.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    cold = found["cold"]["first_step_s"]
    sys.stdout.write(f"first training step, {shape} shapes, torch {found['torch']} on {found['device']}\n")
    for name in ("cold", "warmed", "shipped"):
        way = found[name]
        sys.stdout.write(
            f"  {name:8} {way['first_step_s']:7.1f} s  {way['first_step_s'] / cold:5.2f} x cold  "
            f"{way['hits']} hits, {way['misses']} misses, {way['recompiles']} recompiles; "
            f"then {1000 * way['later_step_s']:.0f} ms a step\n"
        )
    shipped, guard = found["shipped"], found["guard"]
    sys.stdout.write(
        f"  warm-up {found['warmed']['warm_up_s']:.1f} s; from a cold container with the artifact "
        f"({shipped['artifact_bytes'] / 1e6:.1f} MB): {shipped['to_first_step_s']:.1f} s to the end of its first step, "
        "starting the job and building the target included\n"
        f"  guard: {guard['guarded_ms']:.3f} ms a step, {guard['plain_ms']:.3f} ms without: "
        f"{guard['guarded_ms'] / guard['plain_ms']:.3f} x\n"
    )


if __name__ == "__main__":
    main()
