"""Warmup: compile in the container, before training, what training will call, into the fingerprinted cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from orchestrator.agent import Agent
from orchestrator.answers import Artifact, Warmup
from orchestrator.console import StepReport
from orchestrator.wheelhouse import cache_folder
from payload.agent.checksum import file_sha256
from payload.recipe import Recipe

COMPILE_IDLE_TIMEOUT_S = 1800.0

T = TypeVar("T")


@dataclass(frozen=True)
class Warmed:
    """The cache that holds what the recipe calls. ``reason`` says why nothing was compiled, when nothing was."""

    cache: str | None
    compiled: bool
    seconds: float
    hits: int
    misses: int
    reason: str
    source: str = ""
    """``compiled``, ``artifact`` (sent from the desk) or ``reused``."""

    def __str__(self) -> str:
        if not self.compiled:
            return f"nothing to compile: {self.reason}"
        how = {
            "compiled": f"compiled in {self.seconds:.0f} s",
            "artifact": f"filled from the desk's artifact in {self.seconds:.0f} s",
        }.get(self.source, "was warm")
        return f"cache {self.cache} {how}; a second process found {self.hits} hits, {self.misses} misses"


def warm_up(
    agent: Agent, report: StepReport, *, release: str, venv: str, recipe: Recipe, prove: bool = False
) -> Warmed:
    """Fill the cache for ``recipe`` with this release and venv, unless it is warm already.

    A cold container first gets the portable artifact of an earlier warmup of the same fingerprint, if this desk has
    one, and compiles only without it; the artifact of what was compiled comes home. ``prove`` runs a second process
    that must find everything in the cache, also when it was warm. Raises
    :class:`orchestrator.errors.OrchestratorError` in the compiler's own words.
    """
    request: dict[str, Any] = {"recipe": recipe.to_dict(), "prove": prove}

    def ask(**more: object) -> Warmup:
        asked = {**request, **more}
        return call_module(Warmup, agent, "payload.compile.warmup", asked, release, venv, report)

    report.update("looking at the compile cache")
    result = ask(check=True)
    if _must_compile(result):
        kept = kept_artifact(result["fingerprint"])
        result = ask(artifact=_send_artifact(agent, kept, report)) if kept.is_file() else ask()
    if result["compiled"] and "artifact" in result:
        _bring_artifact_home(agent, result["fingerprint"], result["artifact"], report)
    return _warmed(result)


def find_warm(agent: Agent, report: StepReport, *, release: str, venv: str, recipe: Recipe) -> Warmed | None:
    """What :func:`warm_up` would find without compiling; None where it would have to."""
    report.update("looking at the compile cache")
    request = {"recipe": recipe.to_dict(), "check": True}
    result = call_module(Warmup, agent, "payload.compile.warmup", request, release, venv, report)
    return None if _must_compile(result) else _warmed(result)


def _must_compile(result: Warmup) -> bool:
    return result["compiled"] and not result.get("warm")


def _warmed(result: Warmup) -> Warmed:
    return Warmed(
        cache=result["fingerprint"],
        compiled=result["compiled"],
        seconds=result.get("seconds", 0.0),
        hits=result.get("hits", 0),
        misses=result.get("misses", 0),
        reason=result.get("reason", ""),
        source=result.get("source", ""),
    )


def kept_artifact(fingerprint: str) -> Path:
    """Where this desk keeps the portable artifact of a compile cache."""
    return cache_folder() / "artifacts" / f"{fingerprint}.bin"


def _send_artifact(agent: Agent, artifact: Path, report: StepReport) -> str:
    path = f"{agent.container.settings.root}/incoming/artifact-{artifact.name}"
    agent.container.upload(
        artifact,
        path,
        on_progress=lambda done, total: report.update("sending the compiled artifact", done, total),
    )
    return path


def _bring_artifact_home(agent: Agent, fingerprint: str, artifact: Artifact, report: StepReport) -> None:
    home = kept_artifact(fingerprint)
    if home.is_file() and file_sha256(home) == artifact["sha256"]:
        return
    agent.container.download(
        f"{agent.container.settings.root}/cache/{fingerprint}/{PurePosixPath(artifact['path']).name}",
        home,
        size=artifact["bytes"],
        sha256=artifact["sha256"],
        on_progress=lambda done, total: report.update("bringing the compiled artifact home", done, total),
    )


def call_module(
    shape: type[T],
    agent: Agent,
    module: str,
    request: dict[str, Any],
    release: str | None,
    venv: str | None,
    report: StepReport,
) -> T:
    """Run one of the payload's modules in the container's venv (the current ones without names)."""
    return agent.ask(
        shape,
        "call",
        {"module": module, "request": request, "release": release, "venv": venv, "cache": None, "env": {}},
        on_event=report.on_event,
        idle_timeout_s=COMPILE_IDLE_TIMEOUT_S,
    )
