"""What is in use stays: who uses a folder holds a shared lock on it, and who wants it gone asks for it alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Iterator, Optional

from payload.errors import PayloadError

_WAIT_S = 1.0
_POLL_S = 0.05


@contextlib.contextmanager
def using(*folders: Path) -> Iterator[None]:
    """Keep the folders from being removed or replaced while the block runs.

    Raises PayloadError of kind ``busy`` for one that is going just now.
    """
    with contextlib.ExitStack() as held:
        for folder in folders:
            # Who only asks whether it is in use has it for a moment.
            deadline = time.monotonic() + _WAIT_S
            while (descriptor := _shared(folder)) is None:
                if time.monotonic() >= deadline:
                    raise PayloadError(
                        f"{folder} is just being removed or replaced",
                        "Wait a moment, then try again.",
                        "busy",
                    )
                time.sleep(_POLL_S)
            held.callback(os.close, descriptor)
        yield


def _shared(folder: Path) -> Optional[int]:
    """A descriptor that holds the folder's shared lock, or None when that is not to be had now."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
    os.close(descriptor)
    return None


@contextlib.contextmanager
def unused(path: Path) -> Iterator[bool]:
    """Whether nobody uses ``path``; if so, nobody can begin to while the block runs."""
    try:
        # What cannot be opened so (a link, a socket, nothing at all) is nothing that anybody could be using.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:
            free = False
        yield free
    finally:
        os.close(descriptor)
