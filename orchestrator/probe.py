"""Probe: what the container, its torch and its flex_attention really are."""

from __future__ import annotations

from typing import Any

from orchestrator.agent import Agent
from orchestrator.answers import Status
from orchestrator.console import Console, StepReport
from orchestrator.warmup import call_module


def probe(agent: Agent, report: StepReport) -> dict[str, Any]:
    """Facts of the container, and of the venv when there is one: torch's build, its tracing flag, limits, caches."""
    report.update("asking the container")
    facts = agent.ask(dict[str, Any], "facts", on_event=report.on_event, timeout_s=120.0)
    found: dict[str, Any] = {"container": facts, "venv": None}
    if agent.ask(Status, "status", timeout_s=60.0).get("venv"):
        report.update("asking its torch")
        found["venv"] = call_module(dict[str, Any], agent, "payload.probe", {}, None, None, report)
    return found


def show_probe(console: Console, found: dict[str, Any]) -> None:
    """The answer of :func:`probe` as two tables."""
    console.table(("container", ""), list(_rows(found["container"])))
    if found["venv"] is None:
        console.line(
            "No venv is built yet: `venv` builds it, then `probe` tells of its torch as well.", "yellow"
        )
        return
    console.table(("venv", ""), list(_rows(found["venv"])))


def _rows(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as (dotted name, text) rows."""
    if isinstance(value, dict) and value:
        return [
            row
            for key, inner in value.items()
            for row in _rows(inner, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(value, list) and value and all(isinstance(item, (str, int, float)) for item in value):
        return [(prefix, ", ".join(str(item) for item in value))]
    if isinstance(value, list):
        return [row for number, item in enumerate(value) for row in _rows(item, f"{prefix}[{number}]")] or [
            (prefix, "none")
        ]
    return [(prefix, "none" if value is None or value == {} else str(value))]
