"""Ends a process that hangs, after writing down which thread holds what and waits for what."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

HUNG_EXIT_STATUS = 86
COMPILE_LOCK = "dynamo's compile_lock"
AUTOGRAD_ENGINE = "the autograd engine"
_FRAMES_SHOWN = 12


@dataclass(frozen=True)
class ThreadState:
    """One thread at one moment; ``frames`` innermost last, as ``file:line function``."""

    name: str
    holds: tuple[str, ...]
    waits_for: str | None
    frames: tuple[str, ...]


def watch(deadline_s: float, report: Path) -> threading.Timer:
    """Start the watchdog: after ``deadline_s`` seconds it writes ``report`` (a JSON list of ThreadState) and exits.

    Cancel the timer returned when the work is done. It needs the interpreter to run: a process that hangs with the
    GIL held must be ended from outside.
    """

    def bite() -> None:
        report.write_text(json.dumps([asdict(state) for state in who_holds_what()]), encoding="utf-8")
        os._exit(HUNG_EXIT_STATUS)

    timer = threading.Timer(deadline_s, bite)
    timer.daemon = True
    timer.start()
    return timer


def who_holds_what() -> list[ThreadState]:
    """Every thread that runs Python now, without the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    owner = lock_owner(_compile_lock())
    states = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        stack = traceback.extract_stack(frame)
        states.append(
            ThreadState(
                name=_name(names.get(ident), stack),
                holds=(COMPILE_LOCK,) if ident == owner else (),
                waits_for=_waits_for(frame),
                frames=tuple(
                    f"{_short(entry.filename)}:{entry.lineno} {entry.name}"
                    for entry in stack[-_FRAMES_SHOWN:]
                ),
            )
        )
    return sorted(states, key=lambda state: state.name)


def lock_owner(lock: Any) -> int | None:
    """The ident of the thread that holds a reentrant lock, or None; CPython tells it in the lock's repr."""
    match = re.search(r"owner=(\d+) count=([1-9]\d*)", repr(lock))
    return int(match.group(1)) if match else None


def _compile_lock() -> Any:
    from torch._dynamo import convert_frame

    return convert_frame.compile_lock


def _name(name: str | None, stack: traceback.StackSummary) -> str:
    # Threads that C++ started are unknown to Python, or known as Dummy since they once asked who they are.
    foreign = name is None or name.startswith("Dummy-")
    if foreign and any("autograd" in entry.filename for entry in stack[:2]):
        return "autograd thread of the device"
    return name or "a thread that Python did not start"


def _waits_for(frame: FrameType) -> str | None:
    """What the innermost Python frame is blocked in, as far as its source line tells."""
    entry = traceback.extract_stack(frame)[-1]
    line = entry.line or ""
    if "compile_lock" in line:
        return COMPILE_LOCK
    if entry.name == "_engine_run_backward":
        return AUTOGRAD_ENGINE
    if Path(entry.filename).name == "threading.py" and entry.name in (
        "wait",
        "_wait_for_tstate_lock",
        "join",
    ):
        return "another thread of the program"
    return None


def _short(filename: str) -> str:
    """The path from the package on: ``torch/_dynamo/convert_frame.py``."""
    parts = Path(filename).parts
    if "site-packages" in parts:
        return "/".join(parts[parts.index("site-packages") + 1 :])
    return "/".join(parts[-3:])
