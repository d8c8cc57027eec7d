"""Processes as the kernel sees them: identities that survive pid reuse, and whole trees.

Imported by ``pct`` and by the containers' init, so it imports next to nothing.
"""

from __future__ import annotations

import os

Identity = tuple[int, int, str]
"""pid, start time in clock ticks since boot, boot id."""


def identity(pid: int) -> Identity | None:
    """Who ``pid`` is right now; None when there is no such process, or only its zombie."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] == b"Z":
        return None
    return pid, int(fields[19]), boot_id()


def is_running(who: Identity) -> bool:
    """Whether the very process that ``who`` names still runs."""
    return identity(who[0]) == tuple(who)


def boot_id() -> str:
    """The kernel's random name of this boot; start times mean nothing across boots."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read().decode("ascii").strip()
    except OSError:
        return ""


def descendants(ancestor: int) -> list[int]:
    """Every process below ``ancestor``, zombies included, in no order."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat_fields(int(name))
            if fields is not None:
                children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    todo = [ancestor]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def daemonize() -> None:
    """Leave the caller's process tree and session; the caller's child exits with 0 at once.

    Standard streams stay what they are: whoever starts a daemon points them at ``/dev/null`` and a log.
    """
    if os.fork():
        os._exit(0)
    os.setsid()


def _stat_fields(pid: int) -> list[bytes] | None:
    """``/proc/PID/stat`` from its third field (state) on; the second, the name, may hold spaces and brackets."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
