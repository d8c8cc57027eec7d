"""Folders that are complete or absent: written beside, listed with checksums, synced, renamed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from payload.agent.checksum import file_sha256
from payload.agent.durable import put_in_place, read_json, sync_folder, write_json
from payload.errors import PayloadError

MANIFEST = "manifest.json"


@contextmanager
def sealed_folder(final: Path, **facts: Any) -> Iterator[Path]:
    """Give a temporary folder to fill; when the block ends without an error, seal it and rename it to ``final``.

    The manifest holds ``facts`` and, under ``files``, each file's size and sha256. An older ``final`` is replaced.
    """
    partial = final.with_name(f".{final.name}.{secrets.token_hex(4)}")
    partial.mkdir(parents=True)
    try:
        yield partial
        files = {}
        for path in sorted(partial.rglob("*")):
            if path.is_file():
                files[path.relative_to(partial).as_posix()] = {
                    "size": path.stat().st_size,
                    "sha256": file_sha256(path),
                }
                _sync_file(path)
        write_json(partial / MANIFEST, {**facts, "files": files})
        sync_folder(partial)
        put_in_place(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def open_sealed(folder: Path) -> dict[str, Any]:
    """The manifest of a folder whose every file has the size and checksum listed. Raises ``PayloadError`` if not."""
    try:
        manifest = read_json(folder / MANIFEST)
    except OSError as error:
        raise PayloadError(f"{folder} has no readable {MANIFEST}: {error.strerror}.") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise PayloadError(f"{folder / MANIFEST} is damaged: it lists no files.")
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise PayloadError(f"{folder} lacks {name}.")
        if path.stat().st_size != facts["size"] or file_sha256(path) != facts["sha256"]:
            raise PayloadError(f"{path} is damaged: it differs from its checksum.")
    return manifest


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
