"""Target and drafter on one GPU: each alone, one after the other, and side by side on two streams.

    python -m benchmarks.colocated [--shape qwen3-8b|tiny] [--device cuda|cpu] [--repeats N] [--json]

A step is what training's step is: `TargetProgram.produce`, `DrafterProgram.accumulate` and ``update``, on random
weights and packed random tokens. ``in turn`` is how a rank with both roles runs; ``on two streams`` makes the features
of the next batch while the drafter learns from those of the last. Both halves are bound by matrix products, so no
schedule can be faster than their FLOP together at the ceiling, which is measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.features import Layout, packed_batch, useful_flops
from benchmarks.made_up import Shape, write_target
from benchmarks.timing import device_name, matmul_ceiling, peak_memory, timed
from payload.recipe import Recipe, recipe_from_dict
from payload.trainer.metrics import drafter_step_flops
from payload.trainer.program import DrafterProgram, TargetProgram, build_step
from payload.trainer.transfer import Supply

_LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Case:
    """A training batch, and how many anchors a row has."""

    layout: Layout
    anchors: int


CASES: dict[Shape, tuple[Case, ...]] = {
    "qwen3-8b": (
        Case(Layout("4 x 3072 x 512", 4, 3072, 550), 512),
        Case(Layout("2 x 768 x 256", 2, 768, 550), 256),
    ),
    "tiny": (Case(Layout("2 x 300 x 8", 2, 300, 60), 8),),
}


def recipe_of(shape: Shape, target: Path, case: Case) -> Recipe:
    """The recipe whose step is measured; both roles on one rank."""
    return recipe_from_dict(
        {
            "name": f"colocated-{shape}",
            "target": {"model": str(target), "random_weights": True},
            "drafter": {"num_layers": 5 if shape == "qwen3-8b" else 2, "mask_token_id": 3},
            "data": {"train": ["none"], "max_length": case.layout.length},
            "train": {"steps": 1, "batch_size": case.layout.rows, "num_anchors": case.anchors},
            "compile": "auto" if shape == "qwen3-8b" else "off",
        }
    )


class _Sides:
    """The two halves of a step on one batch."""

    def __init__(
        self, target: TargetProgram, drafter: DrafterProgram, case: Case, device: torch.device
    ) -> None:
        self._target, self._drafter = target, drafter
        self.batch = packed_batch(case.layout, target.target.config.vocab_size, device)
        self._supply = self.produce()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def produce(self) -> Supply:
        return self._target.produce(self.batch)

    def learn(self, supply: Supply | None = None) -> None:
        sums = self._drafter.accumulate(supply or self._supply, 0, last=True)
        self._drafter.update(sums, _LEARNING_RATE)

    def in_turn(self) -> None:
        self.learn(self.produce())

    def on_two_streams(self) -> None:
        """Learn from the supply made before, while the next one is made."""
        assert self._stream is not None
        main = torch.cuda.current_stream()
        self._stream.wait_stream(
            main
        )  # no earlier than this step begins: two supplies are alive, never three
        with torch.cuda.stream(self._stream):
            coming = self.produce()
        self.learn(self._supply)
        main.wait_stream(self._stream)
        coming.features.record_stream(main)
        self._supply = coming


def measure_case(
    shape: Shape, target: Path, case: Case, device: torch.device, repeats: int
) -> dict[str, Any]:
    """One case as plain data; throughputs as shares of the slower half alone and of the ceiling."""
    program = build_step(recipe_of(shape, target, case), "both", device)
    assert program.target is not None
    assert program.drafter is not None
    sides = _Sides(program.target, program.drafter, case, device)
    config = program.drafter.drafter.config
    flops = useful_flops(program.target.target.config, config.target_layer_ids, sides.batch.document_ids)
    flops += drafter_step_flops(recipe_of(shape, target, case), config)
    ways: dict[str, Callable[[], object]] = {
        "target": sides.produce, "drafter": sides.learn, "in turn": sides.in_turn,
    }  # fmt: skip
    if device.type == "cuda":
        ways["on two streams"] = sides.on_two_streams
    ceiling = matmul_ceiling(device)
    timings = {name: timed(work, device, repeats) for name, work in ways.items()}
    memory = {name: peak_memory(work, device) for name, work in ways.items()}
    slower = max(timings["target"].median_ms, timings["drafter"].median_ms)
    together = {name: timing for name, timing in timings.items() if name not in ("target", "drafter")}
    return {
        "case": case.layout.name,
        "samples": case.layout.rows,
        "ms": {name: asdict(timing) for name, timing in timings.items()},
        "memory_bytes": memory,
        "held_bytes": torch.cuda.memory_allocated(device) if device.type == "cuda" else None,
        "of_the_slower_alone": {name: slower / timing.median_ms for name, timing in together.items()},
        "share_of_ceiling": {
            name: flops / (timing.median_ms / 1000) / ceiling for name, timing in together.items()
        },
        "highest_possible_of_the_slower": slower / (1000 * flops / ceiling),
        "ceiling_tflops_per_s": ceiling / 1e12,
    }


def measure(shape: Shape, device: torch.device, repeats: int) -> dict[str, Any]:
    """All cases of a shape."""
    with tempfile.TemporaryDirectory(prefix="colocated-") as folder:
        target = write_target(Path(folder), shape)
        cases = [measure_case(shape, target, case, device, repeats) for case in CASES[shape]]
    return {"torch": torch.__version__, "device": device_name(device), "shape": shape, "cases": cases}


def describe(found: dict[str, Any]) -> str:
    """The figures as lines for a person."""
    lines = [
        f"target and drafter on one device, {found['shape']} shapes, torch {found['torch']} on {found['device']}"
    ]
    for case in found["cases"]:
        lines.append(f"  {case['case']}; matrix products reach {case['ceiling_tflops_per_s']:.2f} TFLOP/s")
        for name, timing in case["ms"].items():
            memory = case["memory_bytes"][name]
            line = (
                f"    {name:15} {timing['median_ms']:8.1f} ms ({timing['fastest_ms']:.1f} to "
                f"{timing['slowest_ms']:.1f})  {1000 * case['samples'] / timing['median_ms']:6.2f} samples/s"
            )
            line += "" if memory is None else f"  {memory / 2**30:6.2f} GiB"
            if name in case["of_the_slower_alone"]:
                line += (
                    f"  {case['of_the_slower_alone'][name]:.0%} of the slower alone "
                    f"({case['highest_possible_of_the_slower']:.0%} at the ceiling), "
                    f"{case['share_of_ceiling'][name]:.0%} of the ceiling"
                )
            lines.append(line)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=list(CASES), help="qwen3-8b on a GPU, else tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU when there is one")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    shape: Shape = given.shape or ("qwen3-8b" if device.type == "cuda" else "tiny")
    found = measure(shape, device, given.repeats)
    sys.stdout.write((json.dumps(found, indent=1) if given.json else describe(found)) + "\n")


if __name__ == "__main__":
    main()
