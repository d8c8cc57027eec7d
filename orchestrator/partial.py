"""A file on its way home: it grows beside its place, by one download at a time, until it is whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

_POLL_S = 0.1


@contextlib.contextmanager
def only_writer(partial: Path, on_wait: Callable[[], None]) -> Iterator[IO[bytes]]:
    """The file ``partial``, made if it is not there, at its end, and nobody else's while the block runs.

    ``on_wait`` is called once if another download, of this process or another, has to end first. Raises OSError.
    """
    partial.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with partial.open("ab") as file:
            _lock(file.fileno(), on_wait)
            if _is_at(partial, file.fileno()):
                yield file
                return


def _lock(descriptor: int, on_wait: Callable[[], None]) -> None:
    waits = False
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if not waits:
            waits = True
            on_wait()
        time.sleep(_POLL_S)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file is still at ``path``: whoever held it before may have put it in place or removed it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
