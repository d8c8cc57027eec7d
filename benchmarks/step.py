"""How fast one training step of a drafter is, and whether the fast step computes what the readable one does.

``python -m benchmarks.step --shape large`` on a GPU measures: Qwen3-8B's drafter with random weights, forward,
backward and update, as training calls them. ``--shape tiny`` on a CPU checks loss, gradients and updated weights of
the fast step against the reference, and that it is no slower. ``--help`` tells the rest.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.step_measure import assert_never_waits, kernel_groups, matmul_ceiling, one_step, time_steps
from benchmarks.step_shapes import (
    SHAPES,
    Fp8,
    Loss,
    Shape,
    attention_flop,
    build_program,
    build_supply,
    linear_flop,
    needed_linear_flop,
    recipe_of,
)
from benchmarks.step_variants import LEVERS, variant
from payload.compile.counts import read_counts
from payload.compile.guard import install
from payload.errors import PayloadError
from payload.trainer.program import DrafterProgram
from payload.trainer.transfer import Supply

# Of a CPU's time for the reference step; two measurements of the same step differ by this much.
NO_SLOWER = 1.15

# Levers that a check leaves out: none.
CHECKED_OFF: tuple[str, ...] = ()

# Relative distance of gradients from the reference's that rounding explains.
_LIMITS = {"torch.float32": 1e-4, "torch.bfloat16": 4e-2, "fp8": 0.3}


@dataclass(frozen=True)
class Options:
    """What the command line chose; ``off`` are levers taken back."""

    shape: str
    variant: str
    off: tuple[str, ...]
    steps: int
    warm_s: float
    profile: bool
    loss: Loss
    fp8: tuple[Fp8, ...]


def measure(options: Options) -> dict[str, Any]:
    """Build, compile and measure one variant of the step on the GPU.

    Raises where a step waits for the device, or compiles anything after the first one.
    """
    shape, device = SHAPES[options.shape], torch.device("cuda")
    recipe = recipe_of(shape, options.loss, options.fp8)
    torch._dynamo.reset()
    with variant(options.variant, options.off, shape.drafter.block_size):
        program = build_program(shape, recipe, device, compiled=True)
        supply = build_supply(shape, recipe, device)
        measured = _measure(program, supply, shape, options)
    del program, supply
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "shape": options.shape,
        "variant": options.variant,
        "off": list(options.off),
        "fp8": list(options.fp8),
        **measured,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def _measure(program: DrafterProgram, supply: Supply, shape: Shape, options: Options) -> dict[str, Any]:
    guard = install()

    def step(number: int) -> torch.Tensor:
        return one_step(program, supply, number)

    began, before = time.monotonic(), read_counts()
    with guard.first_step():
        first = step(0)
        torch.cuda.synchronize()
    first_s, graphs = time.monotonic() - began, read_counts().since(before).compilations
    guard.seal()
    try:
        assert_never_waits(step)
        timing = time_steps(step, options.steps, options.warm_s)
        ceiling = matmul_ceiling()
        groups, kernels = kernel_groups(step) if options.profile else ({}, {})
    finally:
        guard.unseal()
    seconds, linear = timing.median_ms / 1e3, linear_flop(shape)
    needed = needed_linear_flop(shape) + attention_flop(shape, supply)
    return {
        "loss_of_first_step": (first[0] / first[1]).item(),
        **asdict(timing),
        "draft_tokens_per_s": shape.draft_tokens / seconds,
        "counted_linear_tflop": linear / 1e12,
        "counted_linear_tflop_per_s": linear / 1e12 / seconds,
        "needed_tflop": needed / 1e12,
        "needed_tflop_per_s": needed / 1e12 / seconds,
        "matmul_tflop_per_s": ceiling / 1e12,
        "share_of_matmul": needed / seconds / ceiling,
        "first_step_s": first_s,
        "graphs": graphs,
        "kernel_ms": groups,
        "longest_kernels_ms": kernels,
    }


def check(options: Options, device: torch.device, compiled: bool) -> dict[str, Any]:
    """Compare the fast step with the reference: loss, gradients, weights after the update, and time.

    Raises PayloadError where they differ by more than the dtype's rounding, or where the fast step is slower on a CPU.
    """
    shape = SHAPES[options.shape]
    results, programs = {}, {}
    for name in ("reference", "fast"):
        torch._dynamo.reset()
        with variant(name, options.off if name == "fast" else (), shape.drafter.block_size):
            recipe = recipe_of(shape, options.loss, options.fp8 if name == "fast" else ())
            programs[name] = build_program(shape, recipe, device, compiled)
            supply = build_supply(shape, recipe, device)
            results[name] = _compared(programs[name], supply)
    worst = {
        part: max(
            _distance(fast, plain)
            for fast, plain in zip(results["fast"][part], results["reference"][part], strict=True)
        )
        for part in ("sums", "gradients", "update")
    }
    limit = _LIMITS["fp8" if options.fp8 else str(shape.dtype)]
    if not all(distance <= limit for distance in worst.values()):
        raise PayloadError(f"the fast step differs from the reference by {worst}, more than {limit}")
    seconds = {} if device.type != "cpu" else _alternating_seconds(programs, supply, options, shape)
    ratio = seconds["fast"] / seconds["reference"] if seconds else None
    if ratio is not None and ratio > NO_SLOWER and not options.fp8:
        raise PayloadError(f"the fast step takes {ratio:.2f} times as long as the reference: {seconds}")
    return {"shape": options.shape, "difference": worst, "limit": limit, "seconds": seconds, "ratio": ratio}


def _compared(program: DrafterProgram, supply: Supply) -> dict[str, list[torch.Tensor]]:
    """Sums and gradients of a micro-batch, and what the update changed."""
    parameters = list(program.drafter.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    sums = program.accumulate(supply, 0, last=True)
    gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    program.update(sums, 1e-3)
    change = [parameter.detach() - old for parameter, old in zip(parameters, before, strict=True)]
    # The update of a weight is nearly its gradient's sign, so that rounding shows in a few of them: its mean counts.
    return {"sums": [sums[:2]], "gradients": gradients, "update": [torch.stack([c.norm() for c in change])]}


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).double().norm() / b.double().norm().clamp(min=1e-30))


def _alternating_seconds(
    programs: dict[str, DrafterProgram], supply: Supply, options: Options, shape: Shape
) -> dict[str, float]:
    """The least time of a step of each program; they take turns, so that both meet the same machine.

    Where the fast one seems slower, other programs may have taken the machine: then more turns, up to ten times.
    """
    times: dict[str, list[float]] = {name: [] for name in programs}
    least: dict[str, float] = {}
    for number in range(10 * options.steps + 2):
        for name, program in programs.items():
            with variant(name, options.off if name == "fast" else (), shape.drafter.block_size):
                began = time.perf_counter()
                one_step(program, supply, number)
                times[name].append(time.perf_counter() - began)
        if number >= options.steps + 2:
            least = {name: min(of_one[2:]) for name, of_one in times.items()}
            if least["fast"] <= NO_SLOWER * least["reference"]:
                break
    return least


def table(results: list[dict[str, Any]]) -> str:
    """The measurements for a person."""
    lines = [
        f"{'shape':7} {'variant':32} {'ms':>7} {'min':>7} {'max':>7} {'GiB':>6} {'tokens/s':>9} {'TFLOP/s':>8} "
        f"{'of matmul':>9}  attention linear  head  optimizer  rest  first step"
    ]
    for result in results:
        name = result["variant"] + "".join(
            [f" fp8-{part}" for part in result["fp8"]] + [f" -{lever}" for lever in result["off"]]
        )
        groups = result["kernel_ms"]
        lines.append(
            f"{result['shape']:7} {name:32} {result['median_ms']:7.1f} {result['least_ms']:7.1f} "
            f"{result['greatest_ms']:7.1f} {result['peak_gib']:6.1f} {result['draft_tokens_per_s']:9.0f} "
            f"{result['needed_tflop_per_s']:8.0f} {result['share_of_matmul']:9.1%}  "
            + "  ".join(f"{groups.get(group, 0):7.1f}" for group in _GROUPS)
            + f"  {result['first_step_s']:6.1f} s"
        )
    return "\n".join(lines)


_GROUPS = ("attention", "linear", "head", "optimizer", "rest")


def main(arguments: list[str] | None = None) -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(prog="benchmarks.step", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", help="large on a GPU, else tiny")
    parser.add_argument("--variant", choices=("fast", "reference"), nargs="*", default=["fast"])
    parser.add_argument(
        "--off",
        nargs="*",
        default=[],
        metavar="LEVERS",
        help="also measure the fast step without these (joined by +; each: one by one): "
        + "; ".join(f"{name}: {what}" for name, (what, _) in LEVERS.items()),
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-s", type=float, default=3.0, help="seconds of steps before those that count")
    parser.add_argument("--loss", choices=("ce", "dpace", "kl"), default="ce")
    parser.add_argument("--fp8", choices=("head", "mlp"), nargs="*", default=[], help="compute these in FP8")
    parser.add_argument("--profile", action="store_true", help="kernel time by group and the longest kernels")
    parser.add_argument(
        "--check", action="store_true", help="compare with the reference instead of measuring"
    )
    parser.add_argument("--json", action="store_true", help="print results as JSON lines")
    chosen = parser.parse_args(arguments)
    gpu = torch.cuda.is_available()
    checks = chosen.check or not gpu
    selections = [(name, ()) for name in chosen.variant]
    for lever in list(LEVERS) if chosen.off == ["each"] else chosen.off:
        selections.append(("fast", tuple(lever.split("+"))))
    results: list[dict[str, Any]] = []
    failed = False
    for shape in chosen.shape or ["large" if gpu else "tiny"]:
        for name, off in [("fast", CHECKED_OFF)] if checks else selections:
            fp8 = tuple(chosen.fp8) if name == "fast" else ()
            options = Options(shape, name, off, chosen.steps, chosen.warm_s, chosen.profile, chosen.loss, fp8)
            try:
                result = (
                    check(options, torch.device("cuda" if gpu else "cpu"), gpu)
                    if checks
                    else measure(options)
                )
            except PayloadError as error:
                print(f"{shape} {name} {' '.join(off)}: {error.message}", file=sys.stderr)  # noqa: T201
                failed = True
                continue
            results.append(result)
            if chosen.json or checks:
                print(json.dumps(result), flush=True)  # noqa: T201
    if results and not checks:
        print(table(results), flush=True)  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
