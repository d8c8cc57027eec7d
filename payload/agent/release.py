"""Releases: what a payload tree is called, how it travels, and how it is put in place."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
import socket
import stat
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import Iterator, List, Tuple

from payload.agent import durable
from payload.agent.bytecode import compile_agent
from payload.agent.checksum import file_sha256
from payload.agent.layout import Layout, active_name
from payload.agent.locks import hold
from payload.agent.processes import boot_id
from payload.agent.protocol import PROTOCOL, Events, Json, Request
from payload.agent.system import has_systemd
from payload.errors import PayloadError

_LOCK_WAIT_S = 60.0
_CHUNK_BYTES = 1024 * 1024
# The archive is a Python program: it can put itself in place before any release exists.
_ARCHIVE_MAIN = """\
import sys

sys.dont_write_bytecode = True

from payload.agent.main import main

sys.exit(main(sys.argv))
"""


def tree_files(folder: Path) -> List[Path]:
    """The files that make a payload tree, sorted by their POSIX path relative to ``folder``.

    Not part of it: names that begin with a dot, ``__pycache__`` and ``*.pyc``. Raises PayloadError for
    anything that is neither a folder nor a regular file (a symbolic link has no content of its own).
    """

    def walk(directory: Path) -> Iterator[Path]:
        for entry in directory.iterdir():
            if entry.name.startswith(".") or entry.name == "__pycache__" or entry.suffix == ".pyc":
                continue
            mode = entry.lstat().st_mode
            if stat.S_ISDIR(mode):
                yield from walk(entry)
            elif stat.S_ISREG(mode):
                yield entry
            else:
                raise PayloadError(
                    f"{entry} is neither a file nor a folder", "A release holds regular files only."
                )

    return sorted(walk(folder), key=lambda path: path.relative_to(folder).as_posix())


def tree_hash(folder: Path) -> str:
    """The release name of the payload tree at ``folder``: 16 hexadecimal digits.

    The first 16 digits of the SHA-256 over, for each of :func:`tree_files` in their order,
    ``"<x or -> <SHA-256 of the content, hexadecimal> <relative POSIX path>\\0"`` in UTF-8, where ``x`` means
    that its owner may execute it.
    """
    digest = hashlib.sha256()
    for path in tree_files(folder):
        flag = "x" if path.stat().st_mode & stat.S_IXUSR else "-"
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{flag} {content} {path.relative_to(folder).as_posix()}\0".encode())
    return digest.hexdigest()[:16]


def build_archive(payload_folder: Path, destination: Path) -> Tuple[str, str, int]:
    """Pack the payload tree into a zip that Python can run. Returns (release, SHA-256, size in bytes).

    The same tree gives the same bytes (with the same zlib). ``python3 -I <destination> receive`` runs it.
    """
    with zipfile.ZipFile(destination, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        _add(archive, "__main__.py", _ARCHIVE_MAIN.encode("ascii"), executable=False)
        for path in tree_files(payload_folder):
            name = f"payload/{path.relative_to(payload_folder).as_posix()}"
            _add(archive, name, path.read_bytes(), bool(path.stat().st_mode & stat.S_IXUSR))
    return tree_hash(payload_folder), file_sha256(destination), destination.stat().st_size


def _add(archive: zipfile.ZipFile, name: str, content: bytes, executable: bool) -> None:
    entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    entry.create_system = 3  # Unix, so that the mode below counts
    entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, content)


def hello(request: Request, events: Events) -> Json:
    """Verb: check that this release is what its name says (``release``, else its folder's), and say who answers.

    With ``activate``, it becomes the current one.
    """
    layout = Layout.at(request.root)
    folder = Path(__file__).resolve().parents[2]
    release = request.get("release", str) or folder.name
    found = tree_hash(folder / "payload")
    if found != release:
        raise PayloadError(
            f"release {release} is damaged: its files hash to {found}", "Deploy again; it will be replaced."
        )
    if request.get("activate", bool) and active_name(layout.current) != release:
        with hold(layout, "deploy", "hello", request.get("holder", str) or "", _LOCK_WAIT_S):
            durable.point(layout.current, layout.release(release))
    return {
        "release": found,
        "protocol": PROTOCOL,
        "python": platform.python_version(),
        "boot_id": boot_id(),
        "hostname": socket.gethostname(),
        "systemd": has_systemd(),
    }


def receive(request: Request, events: Events) -> Json:
    """Verb: put the release in the uploaded archive in place, and switch ``current`` to it.

    The archive is the one that runs (``python3 -I <root>/incoming/NAME.zip receive``), or the one that the
    field ``archive`` names in ``<root>/incoming``. The old release stays current until the new one is whole.
    """
    layout = Layout.at(request.root)
    release = request.need("release", str)
    target = layout.release(release)
    name = request.get("archive", str)
    archive = layout.archive(name) if name else Path(sys.argv[0]).resolve()
    try:
        _check_archive(archive, request.need("sha256", str), request.need("size", int))
        with hold(layout, "deploy", "receive", request.get("holder", str) or "", _LOCK_WAIT_S):
            layout.releases.mkdir(parents=True, exist_ok=True)
            for leftover in durable.leftovers(layout.releases):
                durable.remove(leftover)
            already = target.is_dir() and _is_whole(target, release)
            if not already:
                events.progress(f"unpacking release {release}")
                _unpack(archive, target, release)
            compile_agent(target / "payload")
            durable.point(layout.current, target)
    finally:
        if archive.parent == layout.incoming.resolve():
            durable.remove(archive)
    files = tree_files(target / "payload")
    size_bytes = sum(path.stat().st_size for path in files)
    return {"release": release, "already": already, "files": len(files), "bytes": size_bytes}


def _is_whole(target: Path, release: str) -> bool:
    try:
        return tree_hash(target / "payload") == release
    except (OSError, PayloadError):
        return False


def _check_archive(archive: Path, sha256: str, size: int) -> None:
    again = "Deploy again: the upload was damaged on its way."
    if not archive.is_file():
        raise PayloadError(f"there is no archive {archive}", again)
    found_size = archive.stat().st_size
    if found_size != size:
        raise PayloadError(f"{archive} has {found_size} bytes instead of {size}", again)
    found = file_sha256(archive)
    if found != sha256:
        raise PayloadError(f"{archive} has SHA-256 {found} instead of {sha256}", again)


def _unpack(archive: Path, target: Path, release: str) -> None:
    building = target.with_name(f".{release}.{secrets.token_hex(4)}")
    try:
        try:
            with zipfile.ZipFile(archive) as packed:
                _check_space(target.parent, sum(entry.file_size for entry in packed.infolist()))
                for entry in packed.infolist():
                    if entry.filename != "__main__.py":
                        _extract(packed, entry, building)
        except zipfile.BadZipFile as error:
            raise PayloadError(f"{archive} is not a zip archive: {error}", "Deploy again.") from None
        found = tree_hash(building / "payload")
        if found != release:
            raise PayloadError(f"{archive} holds release {found}, not {release}", "Deploy again.")
        for folder in {path.parent for path in tree_files(building)} | {building}:
            durable.sync_folder(folder)
        durable.put_in_place(building, target)
    finally:
        if building.exists():
            shutil.rmtree(building)


def _check_space(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise PayloadError(
            f"the container's disk is full: {folder} has {free_bytes} bytes free, the release needs {needed_bytes}",
            "Free some space, then deploy again.",
        )


def _extract(packed: zipfile.ZipFile, entry: zipfile.ZipInfo, building: Path) -> None:
    name = PurePosixPath(entry.filename)
    if name.is_absolute() or ".." in name.parts or name.parts[:1] != ("payload",) or entry.is_dir():
        raise PayloadError(f"the archive holds an entry that does not belong there: {entry.filename!r}")
    path = building / name
    path.parent.mkdir(parents=True, exist_ok=True)
    executable = entry.external_attr >> 16 & stat.S_IXUSR
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755 if executable else 0o644)
    with packed.open(entry) as source, os.fdopen(descriptor, "wb") as file:
        shutil.copyfileobj(source, file, _CHUNK_BYTES)
        file.flush()
        os.fsync(file.fileno())
