"""A folder as a container: its configuration, its lock, and whether it runs.

The rules and messages are those of Proxmox VE's own tools, so that what the controller learns here holds there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time

from orchestrator.localnode import init, layout

LOCK_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = init.STOP_TIMEOUT_S + 5.0


class Die(Exception):
    """What ``die`` is in Perl: a message, and the errno of the moment as exit status, 255 when it is 0."""

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.exit_status = number or 255


def load_config(state: str, container_id: str) -> list[tuple[str, str]]:
    """The container's ``key: value`` pairs in the order of the file.

    Raises :class:`Die` when there is no such container.
    """
    path = os.path.join(layout.container_folder(state, container_id), layout.CONFIG)
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise Die(f"Configuration file '{path}' does not exist", error.errno or 0) from None
    pairs = [line.partition(":") for line in lines if line.strip() and not line.startswith("#")]
    return [(key.strip(), value.strip()) for key, _, value in pairs]


def check_lock(state: str, container_id: str) -> None:
    """Raise :class:`Die` when the configuration bears a ``lock`` (backup, snapshot, ...)."""
    held_by = dict(load_config(state, container_id)).get("lock")
    if held_by:
        raise Die(f"CT is locked ({held_by})")


def why_stopped(state: str, container_id: str) -> int:
    """0 when the container runs, else the errno with which its init cannot be reached."""
    try:
        init.connect(layout.container_folder(state, container_id)).close()
    except OSError as error:
        return error.errno or errno.ECONNREFUSED
    return 0


class Lock:
    """The container's one lock, held within ``with``.

    Entering raises :class:`Die` when somebody else holds it for ``timeout_s``.
    """

    def __init__(self, state: str, container_id: str, timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self._path = os.path.join(layout.container_folder(state, container_id), layout.CONTAINER_LOCK)
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    os.close(self._fd)
                    raise Die(f"can't lock file '{self._path}' - got timeout", error.errno or 0) from None
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def start(state: str, container_id: str) -> None:
    """Start the container's init and wait until it answers. The caller holds the lock. Raises :class:`Die`."""
    from orchestrator.localnode import detach  # imports subprocess, which is slow, and only start needs it

    folder = layout.container_folder(state, container_id)
    log = os.path.join(folder, layout.INIT_LOG)
    ready = detach.launch(
        [os.path.join(state, layout.CONTAINER_INIT), container_id],
        environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
        cwd=folder,
        log=log,
    )
    if not ready:
        raise Die(f"startup for container '{container_id}' failed: see {log}")


def stop(state: str, container_id: str) -> None:
    """Kill everything in the container. The caller holds the lock. Raises :class:`Die`."""
    try:
        with init.connect(layout.container_folder(state, container_id)) as connection:
            init.send(connection, init.STOP)
    except OSError:
        pass  # it does not run, or is ending already
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while not why_stopped(state, container_id):
        if time.monotonic() > deadline:
            raise Die(f"container '{container_id}' did not stop within {STOP_TIMEOUT_S:.0f} s")
        time.sleep(0.01)
