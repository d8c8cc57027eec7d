"""Jobs for the agent: plain Python programs in a venv that is only an interpreter."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from orchestrator.agent import Agent
from orchestrator.records import new_run_id
from orchestrator.status import status
from tests.program_runs import spec


def start(agent: Agent, program: str, run_id: str | None = None, **changes: Any) -> str:
    """Start ``program`` as a run and return its id."""
    run_id = run_id or new_run_id()
    agent.call("start", {"run_id": run_id, "spec": spec(run_id, program, **changes)})
    return run_id


def state_of(agent: Agent, run_id: str) -> dict[str, Any]:
    [run] = status(agent, run_id)["runs"]
    return dict(run)


def wait_for(agent: Agent, run_id: str, *states: str, timeout_s: float = 30.0) -> dict[str, Any]:
    """Wait until the run is in one of ``states``."""
    return until(lambda: (run := state_of(agent, run_id))["state"] in states and run, timeout_s)


def until(condition: Callable[[], Any], timeout_s: float = 30.0, every_s: float = 0.1) -> Any:
    """Wait until ``condition`` holds, and return what it returned."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(every_s)
    raise AssertionError(f"{condition} did not come true within {timeout_s:.0f} s")
