"""Cache: the compile caches of a container, looked at, verified and pruned; never one that a run pins."""

from __future__ import annotations

import time
from typing import Any

from orchestrator.agent import Agent
from orchestrator.console import Console, StepReport, size_text
from orchestrator.warmup import call_module

MANAGE = "payload.compile.manage"


def list_caches(agent: Agent, report: StepReport) -> list[dict[str, Any]]:
    """Every cache with its size, whether it is warm, and the runs that pin it."""
    caches: list[dict[str, Any]] = call_module(agent, MANAGE, {"action": "list"}, None, None, report)[
        "caches"
    ]
    return caches


def show_cache(agent: Agent, fingerprint: str, report: StepReport) -> dict[str, Any]:
    """One cache with the facts behind its name. Raises :class:`orchestrator.errors.UsageError` for an unknown one."""
    return call_module(agent, MANAGE, {"action": "show", "fingerprint": fingerprint}, None, None, report)


def verify_cache(agent: Agent, fingerprint: str, report: StepReport) -> list[str]:
    """What of a cache is not as its manifest says; empty when it is whole."""
    found = call_module(agent, MANAGE, {"action": "verify", "fingerprint": fingerprint}, None, None, report)
    return [str(wrong) for wrong in found["wrong"]]


def prune_caches(agent: Agent, report: StepReport, *, apply: bool) -> dict[str, Any]:
    """Remove the caches that no run pins and no warm-up is filling; without ``apply`` only say which they are."""
    return call_module(agent, MANAGE, {"action": "prune", "apply": apply}, None, None, report)


def show_caches(console: Console, caches: list[dict[str, Any]]) -> None:
    rows = [
        (
            cache["fingerprint"],
            size_text(cache["bytes"]),
            "warm" if cache["warm"] else cache["problem"] or "cold",
            ""
            if cache["created_at"] is None
            else time.strftime("%Y-%m-%d %H:%M", time.localtime(cache["created_at"])),
            ", ".join(cache["pinned_by"]) or "none",
        )
        for cache in caches
    ]
    console.table(("compile cache", "size", "state", "made", "pinned by"), rows)
