"""Logs: a run's output at the desk, byte for byte, across broken links."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.agent import Agent, NoAnswer
from orchestrator.answers import LogPiece, LogRead, decoded, understood
from orchestrator.errors import TransportError

FOLLOW_IDLE_TIMEOUT_S = 30.0
RECONNECT_ATTEMPTS = 10
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 15.0


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
    breaks while following, reading goes on at the byte where it stopped, up to ten tries in a row. Raises
    :class:`TransportError` after that, and :class:`orchestrator.errors.UsageError` for a run that is not there.
    """
    position: dict[str, Any] = {"offset": None, "run_id": run_id}

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] != "log":
            return
        piece = understood(LogPiece, event, agent.container, "logs")
        data = decoded(piece["data"], agent.container, "logs")
        position.update(offset=piece["offset"] + len(data), run_id=piece["run_id"])
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
            end = agent.ask(LogRead, "logs", request, on_event=on_event, idle_timeout_s=FOLLOW_IDLE_TIMEOUT_S)
        except TransportError as error:
            never_answered = isinstance(error, NoAnswer) and position["offset"] is None
            failures = 1 if position["offset"] != seen else failures + 1
            if not follow or never_answered or failures > RECONNECT_ATTEMPTS:
                raise
            wait_s = _wait_s(failures)
            notify(f"{error.message} The job is not touched by that; reading on in {wait_s:.1f} s")
            time.sleep(wait_s)
        else:
            return LogEnd(end["run_id"], end["state"], end["offset"])


def _wait_s(failures: int) -> float:
    """Seconds before the next try: twice as long each time, and random, so that many desks do not come back at once."""
    return random.uniform(0.5, 1.0) * min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** (failures - 1))
