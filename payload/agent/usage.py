"""What is in use stays: who uses a folder holds a shared lock on it, and who wants it gone asks for it alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Iterator

from payload.errors import PayloadError


@contextlib.contextmanager
def using(*folders: Path) -> Iterator[None]:
    """Keep the folders from being removed or replaced while the block runs.

    Raises PayloadError of kind ``busy`` for one that is going just now.
    """
    with contextlib.ExitStack() as held:
        for folder in folders:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                is_there = os.path.samestat(os.fstat(descriptor), folder.stat())
            except (BlockingIOError, FileNotFoundError):
                is_there = False
            if not is_there:
                raise PayloadError(
                    f"{folder} is just being removed or replaced",
                    "Wait a moment, then try again.",
                    kind="busy",
                )
        yield


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
