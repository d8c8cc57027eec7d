"""Checkpoints written beside the training that goes on: a large one takes as long as many steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class CheckpointWriter:
    """Runs one write at a time in a thread. The thread holds Python's lock only between copies, files and hashes."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Start ``write`` once the one before it has ended. Raises what that one raised."""
        self.finish()
        self._writing = self._thread.submit(write)

    def finish(self) -> None:
        """Wait until everything is written. Raises what writing raised."""
        if self._writing is None:
            return
        try:
            self._writing.result()
        finally:
            self._writing = None

    def check(self) -> None:
        """Raise what writing raised, if it has ended; waits for nothing."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def settle(self) -> None:
        """Wait as `finish` does and raise nothing, for when there is something worse to tell. From any thread."""
        writing = self._writing
        if writing is not None:
            wait([writing])
