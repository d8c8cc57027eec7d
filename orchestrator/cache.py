"""Cache: the compile caches of a container, looked at, verified and pruned; never one that a run pins."""

from __future__ import annotations

import time
from typing import Any

from orchestrator.agent import Agent
from orchestrator.answers import Cache, Caches, PrunedCaches, Verified
from orchestrator.console import Console, StepReport, size_text
from orchestrator.warmup import call_module

MANAGE = "payload.compile.manage"


def list_caches(agent: Agent, report: StepReport) -> list[Cache]:
    """Every cache with its size, whether it is warm, and the runs that pin it."""
    return call_module(Caches, agent, MANAGE, {"action": "list"}, None, None, report)["caches"]


def show_cache(agent: Agent, fingerprint: str, report: StepReport) -> dict[str, Any]:
    """One cache with the facts behind its name. Raises :class:`orchestrator.errors.UsageError` for an unknown one."""
    request = {"action": "show", "fingerprint": fingerprint}
    return call_module(dict[str, Any], agent, MANAGE, request, None, None, report)


def verify_cache(agent: Agent, fingerprint: str, report: StepReport) -> list[str]:
    """What of a cache is not as its manifest says; empty when it is whole."""
    request = {"action": "verify", "fingerprint": fingerprint}
    return call_module(Verified, agent, MANAGE, request, None, None, report)["wrong"]


def prune_caches(agent: Agent, report: StepReport, *, apply: bool) -> PrunedCaches:
    """Remove the caches that no run pins and no warm-up is filling; without ``apply`` only say which they are."""
    return call_module(PrunedCaches, agent, MANAGE, {"action": "prune", "apply": apply}, None, None, report)


def show_caches(console: Console, caches: list[Cache]) -> None:
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
