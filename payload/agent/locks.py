"""Locks between agents: one file each, held by a process, so that a dead holder holds nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from typing import Iterator

from payload.agent.layout import Layout
from payload.agent.processes import boot_id
from payload.errors import PayloadError

_POLL_S = 0.05


@contextlib.contextmanager
def hold(layout: Layout, name: str, verb: str, holder: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock ``name`` while the block runs.

    ``holder`` says who asked (host and user at the desk) and is shown to whoever finds the lock held.
    Raises PayloadError of kind ``busy`` when it is still held after ``wait_s``.
    """
    layout.locks.mkdir(parents=True, exist_ok=True)
    path = layout.locks / f"{name}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise _busy(name, os.pread(descriptor, 4096, 0)) from None
                time.sleep(_POLL_S)
        entry = {
            "pid": os.getpid(),
            "boot_id": boot_id(),
            "verb": verb,
            "holder": holder,
            "since": time.time(),
        }
        os.ftruncate(descriptor, 0)
        with contextlib.suppress(OSError):
            # On a full disk the lock is held all the same; only its holder's name is missing.
            os.pwrite(descriptor, json.dumps(entry).encode("ascii"), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _busy(name: str, content: bytes) -> PayloadError:
    try:
        entry = json.loads(content)
        age_s = max(0.0, time.time() - entry["since"])
        who = f"by {entry['holder']} " if entry["holder"] else ""
        held = f"held {who}for {age_s:.0f} s (verb {entry['verb']}, pid {entry['pid']} in the container)"
        hint = f"Wait until it is done; if it hangs, end process {entry['pid']} in the container."
    except (ValueError, KeyError, TypeError):
        # The holder has taken the lock and not yet written who it is.
        held, hint = "held by another agent", "Wait a moment, then try again."
    return PayloadError(f"the lock {name!r} is {held}", hint, kind="busy")
