"""Changes that are there wholly or not at all, and are still there after a crash."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Iterator

from payload.errors import PayloadError


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data`` atomically: written beside, synced, renamed."""
    beside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """Replace ``path`` by ``value`` as JSON, atomically."""
    write_file(path, json.dumps(value, indent=1, sort_keys=True).encode("ascii") + b"\n", mode)


def read_json(path: Path) -> Any:
    """The JSON value in ``path``. Raises PayloadError when it is not JSON, OSError when it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise PayloadError(f"{path} is damaged: {error}") from None


def point(link: Path, target: Path) -> None:
    """Let the symbolic link ``link`` point at ``target`` (relative to the link's folder), atomically."""
    beside = link.with_name(f".{link.name}.{os.urandom(4).hex()}")
    beside.symlink_to(os.path.relpath(target, link.parent))
    try:
        beside.replace(link)
    except OSError:
        beside.unlink()
        raise
    sync_folder(link.parent)


def put_in_place(new: Path, path: Path) -> None:
    """Rename the folder ``new`` to ``path``; what was there before is removed afterwards."""
    old = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    existed = os.path.lexists(path)
    if existed:
        path.rename(old)
    try:
        new.rename(path)
    except OSError:
        if existed:
            old.rename(path)
        raise
    sync_folder(path.parent)
    if existed:
        remove(old)


def remove(path: Path) -> None:
    """Remove a file, link or folder; nothing happens when it is not there."""
    if path.is_dir() and not path.is_symlink():
        import shutil  # most verbs remove no folder

        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_wholly(path: Path) -> None:
    """Remove a file or folder that others look for: at once by its name, so that what an interruption leaves is a
    leftover and never half of it."""
    going = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    path.rename(going)
    sync_folder(path.parent)
    remove(going)


def leftovers(folder: Path) -> Iterator[Path]:
    """What an interrupted build left in ``folder``: names that begin with a dot."""
    if folder.is_dir():
        yield from (entry for entry in folder.iterdir() if entry.name.startswith("."))


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
