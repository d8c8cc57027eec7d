"""Prune: runs that are over and data that none needs, when somebody asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.agent import Agent
from orchestrator.answers import RemovedData, RemovedRuns
from orchestrator.console import Console, StepReport, size_text
from orchestrator.records import load_record

REMOVAL_IDLE_TIMEOUT_S = 600.0


def remove_runs(
    agent: Agent, report: StepReport, *, keep: int | None, run_ids: Sequence[str] | None, apply: bool
) -> RemovedRuns:
    """Remove the runs ``run_ids``, or all but the newest ``keep``; without ``apply`` only tell which they are.

    Returns what the agent's verb of that name does. Raises :class:`orchestrator.errors.RefusedError` for a named run
    that is going on, is being read, or from which one that stays went on.
    """
    report.update("looking at the runs")
    request = {"keep": keep, "run_ids": list(run_ids) if run_ids else None, "apply": apply}
    return agent.ask(
        RemovedRuns,
        "remove_runs",
        request,
        on_event=report.on_event,
        idle_timeout_s=REMOVAL_IDLE_TIMEOUT_S,
    )


def show_removed_runs(console: Console, found: RemovedRuns) -> None:
    """The runs with their sizes and where this desk has brought them; those that stay, and why."""
    rows = [
        (run["run_id"], run["state"], size_text(run["bytes"]), _home(run["run_id"])) for run in found["runs"]
    ]
    if rows:
        console.table(("removed" if found["applied"] else "would go", "state", "size", "fetched to"), rows)
    for run_id, why in found["kept"].items():
        console.line(f"  run {run_id} stays: {why}")


def remove_data(
    agent: Agent, report: StepReport, *, kinds: Sequence[str], gone: Sequence[str], apply: bool
) -> RemovedData:
    """Remove the answers, training sets or features (``kinds``) that no run goes on with or can be resumed with;
    without ``apply`` only tell which they would be without the runs ``gone``.

    Returns what the agent's verb of that name does. Raises :class:`orchestrator.errors.RefusedError` while a run is
    preparing its data.
    """
    report.update("looking at the data")
    return agent.ask(
        RemovedData,
        "remove_data",
        {"kinds": list(kinds), "gone": list(gone), "apply": apply},
        on_event=report.on_event,
        idle_timeout_s=REMOVAL_IDLE_TIMEOUT_S,
    )


def show_removed_data(console: Console, found: RemovedData) -> None:
    """The data with their sizes and the runs that used them; those that stay, and why."""
    rows = [
        (
            f"{one['kind']}/{one['name']}",
            size_text(one["bytes"]),
            ", ".join(one["runs"]) or "none that is left",
        )
        for one in found["data"]
    ]
    if rows:
        console.table(("removed" if found["applied"] else "would go", "size", "used by"), rows)
    for name, why in found["kept"].items():
        console.line(f"  {name} stays: {why}")


def _home(run_id: str) -> str:
    record = load_record(run_id)
    return (record.fetched_to if record is not None else None) or "nowhere by this desk"
