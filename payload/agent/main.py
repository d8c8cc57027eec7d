"""The agent's verbs: which function answers which, and what a lost caller means to it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import List, Optional

from payload.agent.protocol import ALIVE_INTERVAL_S, CallerGone, Events, serve


@dataclass(frozen=True)
class Verb:
    """Where a verb's handler is, and whether it goes on to its end when nobody reads the answer any more."""

    module: str
    outlives_caller: bool = False


# Each handler has the verb's name. Modules are imported when asked for: a short verb stays short.
VERBS = {
    "hello": Verb("payload.agent.release"),
    "receive": Verb("payload.agent.release", outlives_caller=True),
    "venv": Verb("payload.agent.venv"),
    "call": Verb("payload.agent.call"),
    "start": Verb("payload.agent.start", outlives_caller=True),
    "stop": Verb("payload.agent.stop", outlives_caller=True),
    "status": Verb("payload.agent.status"),
    "logs": Verb("payload.agent.logs"),
    "files": Verb("payload.agent.artifacts"),
    "facts": Verb("payload.agent.facts"),
    "locks": Verb("payload.agent.locks"),
    "script": Verb("payload.agent.script"),
    "prune": Verb("payload.agent.prune", outlives_caller=True),
    "remove_runs": Verb("payload.agent.remove_runs", outlives_caller=True),
    "remove_data": Verb("payload.agent.remove_data", outlives_caller=True),
}


def main(argv: List[str]) -> int:
    """Run the verb ``argv[1]`` and return the exit status."""
    # Nothing the agent makes may be writable for others, whatever the caller's umask is.
    os.umask(0o022)
    name = argv[1] if len(argv) > 1 else ""
    if name == "supervise":
        from payload.agent.supervisor import main as supervise

        return supervise(argv[2:])
    verb = VERBS.get(name)
    if verb is None or len(argv) != 2:
        sys.stderr.write(f"usage: agent {{{'|'.join(VERBS)}}} < request\n")
        return 2
    handler = getattr(import_module(verb.module), name)
    _notice_lost_caller(verb)
    return serve(handler, outlive_caller=verb.outlives_caller, heartbeat=_start_heartbeat)


def _notice_lost_caller(verb: Verb) -> None:
    if verb.outlives_caller:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Whose lock is broken gets it, and can still say so.
        signal.signal(signal.SIGTERM, _raise_caller_gone)
        return
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _raise_caller_gone)


def _raise_caller_gone(number: int, frame: Optional[FrameType]) -> None:
    raise CallerGone


def _start_heartbeat(events: Events) -> None:
    """Say ``alive`` for as long as the verb runs; a failed write is how a quiet verb learns of a lost caller."""

    def beat() -> None:
        pause = threading.Event()
        while not pause.wait(ALIVE_INTERVAL_S):
            try:
                events.event("alive")
            except CallerGone:
                # Raised again in the main thread, by the handler of this signal, whatever it waits for.
                os.kill(os.getpid(), signal.SIGTERM)
                return

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
