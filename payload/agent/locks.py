"""Locks between agents: one file each, held by a process, so that a dead holder holds nothing.

Who holds one is written in it. Verb ``locks`` shows them, and breaks one by ending its holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Iterator, List, Mapping, Optional, Tuple

from payload.agent.layout import Layout
from payload.agent.processes import ProcessId, boot_id, descendants, end, identify, is_alive
from payload.agent.protocol import CallerGone, Events, Json, Request
from payload.errors import PayloadError

_POLL_S = 0.05
_BREAK_GRACE_S = 3.0
_SUFFIX = ".lock"
_RUN_PREFIX = "run-"
RUN_LOCK_FILE = "state.lock"


@contextlib.contextmanager
def hold(layout: Layout, name: str, verb: str, holder: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock ``name`` while the block runs.

    ``holder`` says who asked (host and user at the desk) and is shown to whoever finds the lock held.
    Raises PayloadError of kind ``busy`` when it is still held after ``wait_s``.
    """
    layout.locks.mkdir(parents=True, exist_ok=True)
    with _held(layout.locks / f"{name}{_SUFFIX}", name, verb, holder, wait_s):
        yield


@contextlib.contextmanager
def hold_run(layout: Layout, run_id: str, wait_s: float) -> Iterator[None]:
    """Hold the lock of a run's state, which lies in the run's own folder and goes with it.

    Its name is ``run-<run id>``. Raises as :func:`hold` does, and FileNotFoundError when there is no such folder.
    """
    with _held(layout.run(run_id) / RUN_LOCK_FILE, f"{_RUN_PREFIX}{run_id}", "state", "", wait_s):
        yield


@contextlib.contextmanager
def _held(path: Path, name: str, verb: str, holder: str, wait_s: float) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + wait_s
        while not _try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                raise _busy(name, os.pread(descriptor, 4096, 0))
            time.sleep(_POLL_S)
        try:
            entry = {
                **asdict(identify(os.getpid()) or ProcessId(os.getpid(), 0, boot_id())),
                "verb": verb,
                "holder": holder,
                "since": time.time(),
            }
            os.ftruncate(descriptor, 0)
            with contextlib.suppress(OSError):
                # On a full disk the lock is held all the same; only its holder's name is missing.
                os.pwrite(descriptor, json.dumps(entry).encode("ascii"), 0)
            yield
        except CallerGone:
            broken = _broken(name, os.pread(descriptor, 4096, 0))
            if broken is None:
                raise
            raise broken from None
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def locks(request: Request, events: Events) -> Json:
    """Verb: the locks that are held, each with ``name``, ``verb``, ``holder``, ``pid`` and ``age_s``.

    With ``break`` (a name), the process that holds that lock is ended first, with all that it runs: TERM, a few
    seconds, KILL. Its caller is told by whom. What it was making is not used, and removed by the next that makes such a
    thing. Raises PayloadError of kind ``usage`` when nobody holds it.
    """
    layout = Layout.at(request.root)
    broken = request.get("break", str)
    if broken is not None:
        found = next(
            ((path, process) for name, path, process, _ in _all_held(layout) if name == broken), None
        )
        if found is None:
            raise PayloadError(
                f"nobody holds a lock {broken!r}", "`locks` shows those that are held.", "usage"
            )
        path, holder = found
        events.progress(f"ending process {holder.pid}, which holds the lock {broken!r}")
        _mark_broken(path, request.get("holder", str) or "somebody")
        _end_holder(holder)
    return {"locks": [entry for _, _, _, entry in _all_held(layout)], "broken": broken}


def broken_since(layout: Layout, moment: float) -> Optional[PayloadError]:
    """The error for who waits for the holder of a lock that was broken after ``moment``, when one was."""
    for name, path in _files(layout):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = path.read_bytes()
            if json.loads(content)["broken_at"] >= moment:
                return _broken(name, content)
    return None


def _mark_broken(path: Path, by: str) -> None:
    """Write who breaks the lock beside who holds it, so that the holder can tell."""
    with contextlib.suppress(OSError, ValueError, TypeError), path.open("r+b") as file:
        entry = {**json.loads(file.read()), "broken_by": by, "broken_at": time.time()}
        os.pwrite(file.fileno(), json.dumps(entry).encode("ascii"), 0)


def _broken(name: str, content: bytes) -> Optional[PayloadError]:
    try:
        by = json.loads(content)["broken_by"]
    except (ValueError, KeyError, TypeError):
        return None
    return PayloadError(
        f"this was ended by {by}, who broke the lock {name!r}",
        "What it was making is not used. Ask them before you start it again.",
    )


def _files(layout: Layout) -> List[Tuple[str, Path]]:
    """Every lock's name and file."""
    named = [(path.stem, path) for path in sorted(layout.locks.glob(f"*{_SUFFIX}"))]
    runs = sorted(layout.runs.glob(f"*/{RUN_LOCK_FILE}"))
    return named + [(f"{_RUN_PREFIX}{path.parent.name}", path) for path in runs]


def _all_held(layout: Layout) -> Iterator[Tuple[str, Path, ProcessId, Json]]:
    """The locks that are held: (name, file, holder, what is told of it)."""
    for name, path in _files(layout):
        # A lock that is free has no entry, one of a dead holder has that of a process which is not alive.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            entry = json.loads(path.read_bytes())
            holder = ProcessId(entry["pid"], entry["start_time"], entry["boot_id"])
            if is_alive(holder) and _is_locked(path):
                told = {key: entry[key] for key in ("verb", "holder", "pid")}
                yield name, path, holder, {"name": name, "age_s": _age_s(entry), **told}


def _is_locked(path: Path) -> bool:
    """Whether the lock is held, whatever is written in it."""
    with path.open("rb") as file:
        return not _try_lock(file.fileno(), fcntl.LOCK_SH)


def _end_holder(holder: ProcessId) -> None:
    def tree() -> List[ProcessId]:
        return [holder, *descendants(holder.pid)] if is_alive(holder) else []

    left = end(tree, _BREAK_GRACE_S).left
    if left:
        raise PayloadError(f"process {holder.pid} does not end even by KILL", "Restart the container.")


def _age_s(entry: Mapping[str, float]) -> float:
    # Finite whatever was written: no lock is older than the clock.
    return min(time.time(), max(0.0, time.time() - entry["since"]))


def _busy(name: str, content: bytes) -> PayloadError:
    try:
        entry = json.loads(content)
        who = f"by {entry['holder']} " if entry["holder"] else ""
        age_s = _age_s(entry)
        held = f"held {who}for {age_s:.0f} s (verb {entry['verb']}, pid {entry['pid']} in the container)"
        hint = f"Wait until it is done. If it hangs: make locks BREAK={name} ends that process."
    except (ValueError, KeyError, TypeError):
        # The holder has taken the lock and not yet written who it is.
        held, hint = "held by another agent", "Wait a moment, then try again."
    return PayloadError(f"the lock {name!r} is {held}", hint, kind="busy")
