"""Processes by an identity that survives pid reuse, and the finding and ending of whole trees."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Optional, Set

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_KILL_DEADLINE_S = 10.0


@dataclass(frozen=True)
class ProcessId:
    """A process: its pid, its start time (clock ticks since boot, /proc/PID/stat field 22), the boot's id."""

    pid: int
    start_time: int
    boot_id: str


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    start_time: int


def boot_id() -> str:
    """The kernel's id of this boot."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def init_start_time() -> Optional[int]:
    """When process 1 started, in clock ticks since boot: another one after each restart of the container.

    The boot's id alone may not tell: in some containers it is that of the host.
    """
    stat = _stat(1)
    return None if stat is None else stat.start_time


def identify(pid: int) -> Optional[ProcessId]:
    """The identity of the live process ``pid``; None when there is none (a zombie counts as none)."""
    stat = _stat(pid)
    return None if stat is None or stat.state in "ZX" else ProcessId(pid, stat.start_time, boot_id())


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process still runs."""
    return identify(process.pid) == process


def send_signal(process: ProcessId, number: int) -> bool:
    """Signal exactly this process; False when it is gone. Another process with its pid gets nothing."""
    try:
        handle = open_handle(process.pid)
    except ProcessLookupError:
        return False
    try:
        # The handle was opened first: if the identity matches now, the handle is of that process.
        if not is_alive(process):
            return False
        if handle is None:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        if handle is not None:
            os.close(handle)


def open_handle(pid: int) -> Optional[int]:
    """A pidfd, or None where the kernel or this Python has none."""
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
            return None
        raise


def descendants(pid: int) -> List[ProcessId]:
    """Every live process below ``pid``. Reparented ones are found when ``pid`` is a subreaper."""
    boot = boot_id()
    children: Dict[int, List[int]] = {}
    stats: Dict[int, _Stat] = {}
    for candidate in _pids():
        stat = _stat(candidate)
        if stat is not None:
            stats[candidate] = stat
            children.setdefault(stat.parent, []).append(candidate)
    found, waiting = [], list(children.get(pid, ()))
    while waiting:
        child = waiting.pop()
        waiting.extend(children.get(child, ()))
        if stats[child].state not in "ZX":
            found.append(ProcessId(child, stats[child].start_time, boot))
    return found


def with_environment(name: str, value: str) -> List[ProcessId]:
    """Every live process whose environment at its start had ``name=value``."""
    entry = f"{name}={value}".encode()
    found = []
    for pid in _pids():
        try:
            environment = (_PROC / str(pid) / "environ").read_bytes()
        except OSError:
            continue
        if entry in environment.split(b"\0"):
            process = identify(pid)
            if process is not None:
                found.append(process)
    return found


def in_cgroup(path: str) -> List[ProcessId]:
    """Every live process in the cgroup (v2) ``path``, as /proc/PID/cgroup writes it, and in those below it."""
    found = []
    for folder, _, names in os.walk(f"{_cgroup_mount()}{path}"):
        if "cgroup.procs" in names:
            # The cgroup may go while it is looked at.
            with contextlib.suppress(OSError):
                listed = (Path(folder) / "cgroup.procs").read_text()
                found += [
                    process for process in map(identify, map(int, listed.split())) if process is not None
                ]
    return found


def _cgroup_mount() -> str:
    """Where the cgroup (v2) hierarchy is mounted: beside v1's on a machine that has both (systemd's hybrid mode)."""
    for line in (_PROC / "self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            return fields.split()[4]
    return "/sys/fs/cgroup"


def cgroup_of_self() -> Optional[str]:
    """The cgroup (v2) of this process, or None."""
    for line in (_PROC / "self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:]
    return None


@dataclass(frozen=True)
class Ended:
    """What :func:`end` did: the processes it found, and those that would not go."""

    seen: Set[ProcessId]
    left: List[ProcessId]


def end(find: Callable[[], Iterable[ProcessId]], grace_s: float, leader: Optional[int] = None) -> Ended:
    """End every process that ``find`` returns: TERM, ``grace_s`` seconds, then KILL until none is found.

    As long as ``leader`` (a pid) is among them, only it gets the TERM: torchrun passes it on to its ranks, which end
    in order, and a compiler that one of them waits for is not shot from under it.
    """
    seen: Set[ProcessId] = set()
    deadline = time.monotonic() + grace_s
    while True:
        left = list(find())
        leads = [process for process in left if process.pid == leader]
        for process in leads or left:
            # Each once: a second TERM makes some programs abandon their own orderly end.
            if process not in seen:
                seen.add(process)
                send_signal(process, signal.SIGTERM)
        if not left:
            return Ended(seen, [])
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while left and time.monotonic() < deadline:
        for process in left:
            seen.add(process)
            send_signal(process, signal.SIGKILL)
        time.sleep(_POLL_S)
        left = list(find())
    return Ended(seen, left)


def become_subreaper() -> None:
    """Adopt every orphan below this process, so that none leaves its tree (prctl(2))."""
    # Imported here: most verbs need none of it.
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


def _pids() -> List[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> Optional[_Stat]:
    try:
        content = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name is in parentheses and may hold anything, so count from the last one.
    fields = content[content.rindex(b")") + 2 :].split()
    return _Stat(fields[0].decode("ascii"), int(fields[1]), int(fields[19]))
