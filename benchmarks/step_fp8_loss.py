"""Whether FP8 shows in the loss: whole training runs on the demo's target and text, in bf16 with several seeds and in
FP8 with the first of them.

``python -m benchmarks.step_fp8_loss --root FOLDER`` prints the loss of each run over the steps and its distance
to bf16 with the first seed, in units of the distance between two seeds: FP8 counts as unnoticed below one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.made_up import run_job
from payload.recipe import load_recipe

SEEDS = (0, 1, 2)
RUNS: dict[str, dict[str, Any]] = {
    **{f"bf16 seed {seed}": {"train.seed": seed} for seed in SEEDS},
    "fp8 head": {"train.seed": SEEDS[0], "train.fp8": ["head"]},
    "fp8 head, mlp": {"train.seed": SEEDS[0], "train.fp8": ["head", "mlp"]},
}


def train(root: Path, name: str, changes: dict[str, Any], steps: int) -> list[float]:
    """The loss of a run, averaged over each twentieth of its steps."""
    recipe = load_recipe(
        "tiny-cpu",
        {
            "target.dtype": "bfloat16",
            "drafter.intermediate_size": 512,
            "data.eval": [],
            "data.regenerate": False,
            "data.train_rows": 8192,
            "train.steps": steps,
            "train.log_every": steps // 20,
            "train.checkpoint_every": 10 * steps,
            "train.batch_size": 8,
            "train.num_anchors": 64,
            "train.assert_improves": False,
            "topology": {"targets": [0], "drafters": [0]},
            "compile": "off",
            **changes,
        },
    )
    run = run_job(root, recipe, name.replace(" ", "-").replace(",", ""), None, {"OMP_NUM_THREADS": "8"})
    return [line["loss"] for line in run.lines("train") if line["step"] > 1]


def compare(losses: dict[str, list[float]]) -> dict[str, float]:
    """Mean distance of the second half of each curve to that of the first seed, over the mean of the other seeds."""

    def distance(name: str) -> float:
        pairs = list(zip(losses[name], losses[f"bf16 seed {SEEDS[0]}"], strict=True))
        return statistics.mean(abs(a - b) for a, b in pairs[len(pairs) // 2 :])

    between_seeds = statistics.mean(distance(f"bf16 seed {seed}") for seed in SEEDS[1:])
    return {name: distance(name) / between_seeds for name in losses}


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(prog="benchmarks.step_fp8_loss", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="an empty folder for the runs")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    losses = {name: train(chosen.root, name, changes, chosen.steps) for name, changes in RUNS.items()}
    distances = compare(losses)
    if chosen.json:
        print(json.dumps({"losses": losses, "distance_in_seeds": distances}))  # noqa: T201
    for name, curve in losses.items():
        shown = "  ".join(f"{loss:.4f}" for loss in curve[:: max(1, len(curve) // 10)])
        print(f"{name:14} {shown}  last {curve[-1]:.4f}  distance {distances[name]:.2f} of two seeds'")  # noqa: T201


if __name__ == "__main__":
    main()
