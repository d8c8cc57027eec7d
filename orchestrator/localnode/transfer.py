"""``pct push`` and ``pct pull``: one regular file, written in place, by a worker whose failures stay its own.

Everything here that looks careless is what the real tools do, and the reason why the controller does not use them:
the target is truncated in place, the result of the copy is not looked at, and ``pull`` makes the local file before
it opens the source. A worker's error goes to standard error and to nowhere else: the exit status is 0.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import sys
from collections.abc import Callable

_CHUNK_BYTES = 1 << 20


def push(rootfs: str, source: str, destination: str, options: dict[str, str]) -> None:
    """Copy the host's file ``source`` to ``destination`` in the container (relative: to its root folder)."""
    try:
        try:
            source_fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            raise WorkerError(f"failed to open {source} for reading") from None
        _copy(source_fd, _create_file(_inside(rootfs, destination), options))
    except WorkerError as error:
        print(error, file=sys.stderr)  # noqa: T201


def pull(rootfs: str, source: str, destination: str, options: dict[str, str]) -> None:
    """Copy ``source`` in the container (relative: to its root folder) to the host's file ``destination``."""
    try:
        destination_fd = _create_file(destination, options)
        path = _inside(rootfs, source)
        try:
            source_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WorkerError(f"failed to open {source}: {error.strerror}") from None
        _copy(source_fd, destination_fd)
    except WorkerError as error:
        print(error, file=sys.stderr)  # noqa: T201


class WorkerError(Exception):
    """A failure inside the worker: seen on standard error, not in the exit status."""


def _inside(rootfs: str, path: str) -> str:
    """The file of the machine that ``path`` in the container means.

    A real container is kept apart by its mount namespace. A folder shares the machine's paths, so a path that
    leads out of it, by name or through a symbolic link, is refused.
    """
    real_root = os.path.realpath(rootfs)
    real = os.path.realpath(os.path.join(real_root, path))
    if os.path.commonpath([real_root, real]) != real_root:
        raise WorkerError(f"failed to open {path}: it is outside of the container's folder {real_root}")
    return real


def _create_file(path: str, options: dict[str, str]) -> int:
    """Open ``path`` for writing: made when it is new, truncated in place when it exists."""
    uid = _number(options.get("user"), "uid", lambda name: pwd.getpwnam(name).pw_uid)
    gid = _number(options.get("group"), "gid", lambda name: grp.getgrnam(name).gr_gid)
    mode = _mode(options.get("perms"))
    try:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0)
            if mode is None:
                umask = os.umask(0)
                os.umask(umask)
                mode = 0o666 & ~umask
        except FileExistsError:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
    except OSError as error:
        raise WorkerError(f"failed to create file: {path}: {error.strerror}") from None
    if mode is not None:
        os.fchmod(fd, mode)
    if uid != -1 or gid != -1:
        try:
            os.fchown(fd, uid, gid)
        except OSError as error:
            raise WorkerError(f"failed to change file owner: {error.strerror}") from None
    return fd


def _number(name: str | None, what: str, look_up: Callable[[str], int]) -> int:
    if name is None:
        return -1
    if name.isdigit():
        return int(name)
    try:
        return look_up(name)
    except KeyError:
        raise WorkerError(f"failed to get {what} for: {name}") from None


def _mode(perms: str | None) -> int | None:
    """Octal unless it starts with ``0x``."""
    if perms is None:
        return None
    perms = perms if perms.startswith("0") else f"0{perms}"
    try:
        return int(perms, 16 if perms.lower().startswith("0x") else 8)
    except ValueError:
        raise WorkerError(f"invalid mode: '{perms}'") from None


def _copy(source_fd: int, destination_fd: int) -> None:
    # The real copy's result is ignored: a full disk or a folder as source leaves a short file and no message.
    try:
        while data := os.read(source_fd, _CHUNK_BYTES):
            while data:
                data = data[os.write(destination_fd, data) :]
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT):
            raise
