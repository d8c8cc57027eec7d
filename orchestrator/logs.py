"""Logs: a run's output at the desk, byte for byte, across broken links."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.agent import Agent, NoAnswer
from orchestrator.errors import TransportError

FOLLOW_IDLE_TIMEOUT_S = 30.0
RECONNECT_ATTEMPTS = 8
_BACKOFF_S = (0.5, 1, 2, 4, 8, 15, 15, 15)


@dataclass(frozen=True)
class LogEnd:
    """Where reading stopped: the run, its state then, and the byte offset after the last byte shown."""

    run_id: str
    state: str
    offset: int


def show_logs(
    agent: Agent,
    write: Callable[[bytes], None],
    *,
    run_id: str | None = None,
    follow: bool = False,
    tail_lines: int | None = None,
    since_s: float | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> LogEnd:
    """Write a run's output (the newest run's without ``run_id``) and return where it ended.

    ``tail_lines`` and ``since_s`` choose where to begin; ``follow`` goes on until the run is over. When the link
    breaks while following, reading goes on at the byte where it stopped, up to eight tries in a row. Raises
    :class:`TransportError` after that, and :class:`orchestrator.errors.UsageError` for a run that is not there.
    """
    position: dict[str, Any] = {"offset": None, "run_id": run_id}

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] != "log":
            return
        data = base64.b64decode(event["data"])
        position["offset"] = int(event["offset"]) + len(data)
        position["run_id"] = event.get("run_id") or position["run_id"]
        write(data)

    failures = 0
    while True:
        seen = position["offset"]
        request = {
            "run_id": position["run_id"],
            "follow": follow,
            "offset": seen,
            "tail": tail_lines if seen is None else None,
            "since_s": since_s if seen is None else None,
        }
        try:
            end = agent.call("logs", request, on_event=on_event, idle_timeout_s=FOLLOW_IDLE_TIMEOUT_S)
        except NoAnswer:
            if seen is None and position["offset"] is None:
                raise
            failures = _after_failure(failures, progressed=position["offset"] != seen, notify=notify)
        except TransportError:
            if not follow:
                raise
            failures = _after_failure(failures, progressed=position["offset"] != seen, notify=notify)
        else:
            return LogEnd(str(end["run_id"]), str(end["state"]), int(end["offset"]))


def _after_failure(failures: int, *, progressed: bool, notify: Callable[[str], None]) -> int:
    """Wait before the next try; re-raises the error being handled when there were enough tries in a row."""
    failures = 1 if progressed else failures + 1
    if failures > RECONNECT_ATTEMPTS:
        raise
    wait_s = _BACKOFF_S[failures - 1]
    notify(f"the link broke; the job is not touched by that; reading on in {wait_s:g} s")
    time.sleep(wait_s)
    return failures
