"""Status and stop: what a container's runs are doing, and ending one for good."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from orchestrator.agent import Agent
from orchestrator.answers import NotUnderstood, Run, Status, Stopped
from orchestrator.console import Console, StepReport, size_text
from orchestrator.errors import UsageError
from payload.agent.state import ACTIVE

STOP_GRACE_S = 30.0


def is_active(run: Mapping[str, Any]) -> bool:
    """Whether processes of a run may be at work: it is going on, or lost its supervisor while they were."""
    return run["state"] in ACTIVE or bool(run.get("left"))


def status(agent: Agent, run_id: str | None = None) -> Status:
    """The container's runs (or one), newest first, what is deployed, caches, disk and GPUs, as the agent sees them."""
    return agent.ask(Status, "status", {"run_id": run_id}, timeout_s=60.0)


def runs_of(agent: Agent, run_id: str | None = None) -> list[Run]:
    """The container's runs alone (or one), newest first, which is all that most steps ask for."""
    return agent.ask(Status, "status", {"run_id": run_id, "runs_only": True}, timeout_s=60.0)["runs"]


def run_of(agent: Agent, run_id: str) -> Run:
    """The one run of that id."""
    runs = runs_of(agent, run_id)
    if len(runs) != 1 or runs[0]["run_id"] != run_id:
        raise NotUnderstood(agent.container, "status", f"runs are not run {run_id} alone")
    return runs[0]


def newest_run(agent: Agent, *, active: bool = False) -> str:
    """The id of the newest run, or of the newest that is active. Raises :class:`UsageError` when there is none."""
    return newest_of(agent, runs_of(agent), active=active)


def newest_of(agent: Agent, runs: Sequence[Mapping[str, Any]], *, active: bool = False) -> str:
    """The same of what :func:`status` has told: the agent's order counts, not the clock of the desk that named them."""
    for run in runs:
        if not active or is_active(run):
            return str(run["run_id"])
    what = "no run is going on" if active else "there is no run yet"
    raise UsageError(f"{agent.container}: {what}.", "`status` shows all runs, `train` starts one.")


def newest_with_a_checkpoint(agent: Agent, runs: Sequence[Mapping[str, Any]]) -> str:
    """Of what :func:`status` has told, the newest run with a whole checkpoint.

    Raises :class:`UsageError` when none has one, or there is no run.
    """
    newest = newest_of(agent, runs)
    for run in runs:
        if checkpoints_of(run):
            return str(run["run_id"])
    raise UsageError(
        f"{agent.container}: no run has a whole checkpoint yet, the newest, {newest}, neither.",
        f"Its log: make logs RUN_ID={newest} {agent.container.destination.make_arguments}",
    )


def stop(agent: Agent, run_id: str, report: StepReport, *, grace_s: float = STOP_GRACE_S) -> Stopped:
    """End a run: ask its processes, wait ``grace_s``, kill what is left; returns when none is left."""
    report.update(f"asking run {run_id} to end")
    request = {"run_id": run_id, "grace_s": grace_s}
    return agent.ask(Stopped, "stop", request, on_event=report.on_event, timeout_s=grace_s + 120)


def show_status(console: Console, found: Status, place: str) -> None:
    """The answer of :func:`status` as tables; ``place`` means the container on make's command line."""
    console.line(f"release {found.get('release') or 'none'}, venv {found.get('venv') or 'none'}", "bold")
    console.table(RUN_COLUMNS, [tuple(_cells(run).values()) for run in found["runs"]])
    for run in found["runs"]:
        if left := run.get("left"):
            console.line(
                f"run {run['run_id']} lost its supervisor, but {len(left)} of its processes go on. "
                f"End them: make stop RUN_ID={run['run_id']} {place}",
                "yellow",
            )
        elif run["state"] == "lost":
            console.line(
                f"run {run['run_id']} is lost: its supervisor is gone without a word, most likely because the "
                f"container was restarted. If it has a checkpoint, this goes on from it: "
                f"make train RESUME={run['run_id']} {place}",
                "yellow",
            )
    caches = found.get("caches") or []
    if caches:
        console.table(
            ("compile cache", "size"), [(cache["name"], size_text(cache["bytes"])) for cache in caches]
        )
    gpus = found.get("gpus") or []
    if gpus:
        console.table(tuple(gpus[0]), [tuple(gpu.values()) for gpu in gpus])


def overview(found: Status) -> tuple[object, ...]:
    """A container's row among many, under :data:`OVERVIEW`: its active run, else its newest."""
    runs = found["runs"]
    shown = next((run for run in runs if is_active(run)), runs[0] if runs else None)
    cells: dict[str, object] = _cells(shown) if shown else {"run": "no run yet"}
    cells |= {"release": found.get("release"), "GPUs": len(found.get("gpus") or []) or ""}
    return tuple(cells.get(column, "") for column in OVERVIEW)


OVERVIEW = {
    "run": 22,
    "state": 8,
    "for": 11,
    "step": 7,
    "loss": 7,
    "accepted": 8,
    "tokens/s": 8,
    "release": 16,
    "GPUs": 4,
}
"""The columns of :func:`overview` and their widths."""

RUN_COLUMNS = (
    "run",
    "recipe",
    "state",
    "for",
    "step",
    "loss",
    "accepted",
    "tokens/s",
    "checkpoint",
    "log",
    "exit",
)


def checkpoints_of(run: Mapping[str, Any]) -> list[int]:
    """The steps of a run's whole checkpoints, as far as :func:`status` told them."""
    return sorted(run.get("checkpoints") or [])


def _cells(run: Run) -> dict[str, object]:
    metrics = run.get("last_metrics") or {}
    return {
        "run": run["run_id"],
        "recipe": run.get("recipe"),
        "state": run["state"],
        "for": _age(run.get("started_at"), run.get("ended_at")),
        "step": metrics.get("step"),
        "loss": _number(metrics.get("loss")),
        "accepted": _number(metrics.get("accepted_length"), 2),
        "tokens/s": _number(metrics.get("tokens_per_s"), 0),
        "checkpoint": next(iter(checkpoints_of(run)[::-1]), None),
        "log": size_text(run.get("log_bytes")),
        "exit": run.get("exit_code"),
    }


def _age(started: float | None, ended: float | None) -> str:
    """Between two moments that a container told, the second now where it told none."""
    if started is None:
        return ""
    seconds = int((time.time() if ended is None else ended) - started)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {seconds % 60} s"
        if minutes
        else f"{seconds} s"
    )


def _number(value: object, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if _is_finite(value) else ""


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) < sys.float_info.max
