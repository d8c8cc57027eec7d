"""Warmup: compile in the container, before training, what training will call, into the fingerprinted cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.agent import Agent
from orchestrator.console import StepReport
from payload.recipe import Recipe

COMPILE_IDLE_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Warmed:
    """The cache that holds what the recipe calls. ``reason`` says why nothing was compiled, when nothing was."""

    cache: str | None
    compiled: bool
    seconds: float
    hits: int
    misses: int
    reason: str

    def __str__(self) -> str:
        if not self.compiled:
            return f"nothing to compile: {self.reason}"
        return f"cache {self.cache}, {self.seconds:.1f} s, {self.hits} hits, {self.misses} misses"


def warm_up(
    agent: Agent, report: StepReport, *, release: str, venv: str, recipe: Recipe, prove: bool = False
) -> Warmed:
    """Fill the cache for ``recipe`` with this release and venv, unless it is warm already.

    ``prove`` runs a second process that must find everything in the cache, also when it was warm. Raises
    :class:`orchestrator.errors.OrchestratorError` in the compiler's own words.
    """
    report.update("looking at the compile cache")
    result = call_module(
        agent, "payload.compile.warmup", {"recipe": recipe.to_dict(), "prove": prove}, release, venv, report
    )
    return Warmed(
        cache=result["fingerprint"],
        compiled=bool(result["compiled"]),
        seconds=float(result.get("seconds", 0.0)),
        hits=int(result.get("hits", 0)),
        misses=int(result.get("misses", 0)),
        reason=str(result.get("reason", "")),
    )


def call_module(
    agent: Agent,
    module: str,
    request: dict[str, Any],
    release: str | None,
    venv: str | None,
    report: StepReport,
) -> dict[str, Any]:
    """Run one of the payload's modules in the container's venv (the current ones without names)."""
    return agent.call(
        "call",
        {"module": module, "request": request, "release": release, "venv": venv, "cache": None, "env": {}},
        on_event=report.on_event,
        idle_timeout_s=COMPILE_IDLE_TIMEOUT_S,
    )
