"""Put: rows, prompts or a target's folder of the desk, below the container's root, where recipes look for them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from orchestrator.console import StepReport
from orchestrator.container import Container, file_sha256
from orchestrator.errors import UsageError
from payload.agent.layout import Layout


@dataclass(frozen=True)
class Placed:
    """What came of it: files sent, files that were there with the same content, and bytes sent."""

    sent: int
    already_there: int
    sent_bytes: int


def put(container: Container, source: Path, to: str, report: StepReport) -> Placed:
    """Bring the file, or every file of the folder, ``source`` to ``to``, a path relative to the container's root.

    A file arrives whole, verified by hash, or not at all; one that is there with the same content is not sent again.
    Raises :class:`UsageError` for a source that cannot be read and for a place that is not the user's, and
    :class:`orchestrator.errors.OrchestratorError` when the container or the link fails.
    """
    place = _place(container.settings.root, to)
    files = _files(source)
    total = sum(size for _, size in files)
    done = sent = sent_bytes = 0
    if source.is_file() and container.run(["test", "-d", str(place)]).exit_status == 0:
        raise UsageError(
            f"{to} is a folder in the container.",
            f"Give the file's own place: {to.rstrip('/')}/{source.name}",
        )
    for file, size in files:
        target = place if source.is_file() else place / file.relative_to(source).as_posix()
        report.update(f"{file.name}", done, total)
        if container.sha256(str(target)) != _sha256(file):
            container.upload(file, str(target), on_progress=report.part_of(file.name, done, total))
            sent += 1
            sent_bytes += size
        done += size
    return Placed(sent, len(files) - sent, sent_bytes)


def _place(root: str, to: str) -> PurePosixPath:
    """``to`` below ``root``; the folders that the agent keeps there are its own."""
    relative = PurePosixPath(to)
    if relative.is_absolute():
        if not relative.is_relative_to(root):
            raise UsageError(f"{to} is not below the container's root {root}.", "Give a path relative to it.")
        relative = relative.relative_to(root)
    if not relative.parts or ".." in relative.parts or "\0" in to:
        raise UsageError(f"{to!r} is no place below the container's root.", "For example: data/train.jsonl.")
    layout = Layout.at(root)
    kept = (
        layout.releases, layout.current, layout.venvs, layout.venv_link, layout.caches, layout.uv_cache, layout.runs,
        layout.locks, layout.incoming,
    )  # fmt: skip
    if relative.parts[0] in {path.name for path in kept}:
        raise UsageError(
            f"{relative.parts[0]}/ below {root} belongs to the tool.",
            "For example: data/train.jsonl, models/mine.",
        )
    return PurePosixPath(root) / relative


def _files(source: Path) -> list[tuple[Path, int]]:
    """The regular files of ``source`` with their sizes in bytes, in order."""
    if source.is_file():
        return [(source, source.stat().st_size)]
    if not source.is_dir():
        raise UsageError(f"There is no file or folder {source}.", "Name one of the desk.")
    found: list[tuple[Path, int]] = []
    try:
        for folder, folders, names in os.walk(source, onerror=_refuse_unreadable):
            for path in [Path(folder, name) for name in names + folders]:
                if path.is_file():
                    found.append((path, path.stat().st_size))
                elif path.is_symlink() or not path.is_dir():
                    raise UsageError(
                        f"{path} is neither a file nor a folder of {source}: it would be left out.",
                        "Put what it leads to by itself, or take it out of the folder.",
                    )
    except OSError as error:
        raise _unreadable(error) from None
    if not found:
        raise UsageError(f"The folder {source} holds no file.")
    return sorted(found)


def _sha256(file: Path) -> str:
    try:
        return file_sha256(file)
    except OSError as error:
        raise _unreadable(error) from None


def _refuse_unreadable(error: OSError) -> None:
    raise error


def _unreadable(error: OSError) -> UsageError:
    return UsageError(f"{error.filename} cannot be read: {error.strerror}.")
