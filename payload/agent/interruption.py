"""The signals that tell the agent to end, kept waiting while it does what must be done to its end."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType
from typing import Dict, Iterator, List, Optional

ENDING_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def signals_noted() -> Iterator[List[int]]:
    """Only note HUP, INT and TERM while the block runs, in the list that it gets; then let the first take effect.

    One that is ignored stays so. For the main thread. The thread's signal mask would not do: the kernel gives a
    process's signal to a thread that does not block it, and Python runs the handler in the main thread all the same.
    """
    came: List[int] = []

    def note(number: int, frame: Optional[FrameType]) -> None:
        came.append(number)

    before: Dict[signal.Signals, signal._HANDLER] = {}
    try:
        for number in ENDING_SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):
                before[number] = handler
                signal.signal(number, note)
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
