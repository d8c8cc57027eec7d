"""Estimate: the GPU memory that each role of a recipe needs, term by term, and which cards hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.agent import Agent
from orchestrator.answers import Estimate, Estimates
from orchestrator.console import Console, StepReport
from orchestrator.errors import UsageError
from orchestrator.warmup import call_module
from payload.errors import PayloadError
from payload.estimate import GPU_BYTES, describe_estimates
from payload.estimate import estimate as estimate_recipe
from payload.recipe import Recipe
from payload.target_shape import shape_of_target


def estimate(recipe: Recipe, config: Path | None = None) -> list[dict[str, Any]]:
    """An estimate for each role, by what the desk knows of the target: ``config``, a folder here, or published sizes.

    Raises :class:`UsageError` when it knows nothing of it, or when the drafter does not fit it.
    """
    try:
        return describe_estimates(estimate_recipe(recipe, shape_of_target(recipe.target, config)))
    except PayloadError as error:
        raise UsageError(error.message, error.hint) from None


def estimate_in_container(agent: Agent, recipe: Recipe, report: StepReport) -> list[Estimate]:
    """The same, by the target's config as the container has it; needs a venv there."""
    report.update("asking for the target's sizes")
    request = {"recipe": recipe.to_dict()}
    return call_module(Estimates, agent, "payload.estimate", request, None, None, report)["estimates"]


def show_estimates(console: Console, recipe: Recipe, estimates: Sequence[Mapping[str, Any]]) -> None:
    """A table for each role."""
    for one in estimates:
        ranks = ", ".join(map(str, one["ranks"]))
        rows = [(name, _gib(size)) for name, size in one["terms"].items() if size]
        rows.append((f"allocated at the peak, {one['phase']}", _gib(one["allocated_bytes"])))
        rows.append(("with fragments and CUDA itself", _gib(one["needed_bytes"])))
        fits = ", ".join(f"{size} GB" for size in one["cards"]) or f"none up to {max(GPU_BYTES)} GB"
        rows.append(("GPUs that hold it", fits))
        rows += [
            (f"for comparison: {phase}", _gib(size))
            for phase, size in one["phases"].items()
            if phase != one["phase"]
        ]
        console.table((f"{recipe.name}: {one['role']} (rank {ranks})", "GiB"), rows)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f}"
