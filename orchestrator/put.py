"""Put: rows, prompts or a target's folder of the desk, below the container's root, where recipes look for them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from orchestrator.console import StepReport
from orchestrator.container import Container
from orchestrator.errors import UsageError
from orchestrator.remote_files import Entry, entries, hashes, remove, resolved, set_executable
from payload.agent.checksum import file_sha256
from payload.agent.layout import OWN, PARTIAL_PREFIX


@dataclass(frozen=True)
class Placed:
    """What came of it: files sent, files that were there with the same content, and bytes sent.

    ``others``: paths, relative to the place, of what lies there and is not in the folder that was put; ``removed``
    says whether it was removed.
    """

    sent: int
    already_there: int
    sent_bytes: int
    others: tuple[str, ...] = ()
    removed: bool = False


@dataclass(frozen=True)
class _Source:
    path: Path
    size: int
    executable: bool


def put(container: Container, source: Path, to: str, report: StepReport, *, delete: bool = False) -> Placed:
    """Bring the file, or every file of the folder, ``source`` to ``to``, a path relative to the container's root.

    A file arrives whole, verified by hash, with its executable bit, or not at all; one that is there with the same
    content is not sent again. What else lies in the folder stays, unless ``delete``. Raises :class:`UsageError` for a
    source that cannot be read and for a place that is not the user's, by its name or by a link, and
    :class:`orchestrator.errors.OrchestratorError` when the container or the link fails.
    """
    place = _place(container.settings.root, to)
    files = _files(source)
    is_folder = not source.is_file()
    if delete and not is_folder:
        raise UsageError(
            f"{source} is a file: there is nothing to remove beside it.", "Leave DELETE= (--delete) out."
        )
    report.update("looking at what is there")
    place = _real_place(container, place, files, is_folder)
    there = entries(container, str(place), below=is_folder)
    _refuse_what_is_in_the_way(to, source, files, there, is_folder)
    same = _same(container, place, files, there)
    total = sum(file.size for file in files.values())
    done = sent_bytes = 0
    for name, file in files.items():
        report.update(f"{file.path.name}", done, total)
        if name not in same:
            container.upload(
                file.path,
                str(place / name),
                mode=0o755 if file.executable else 0o644,
                on_progress=report.part_of(file.path.name, done, total),
            )
            sent_bytes += file.size
        done += file.size
    for executable in (True, False):
        changed = (n for n in same if files[n].executable == executable != there[n].executable)
        set_executable(container, (str(place / name) for name in changed), executable)
    others = _others(files, there) if is_folder else ()
    if delete:
        _remove(container, place, files, others)
    return Placed(len(files) - len(same), len(same), sent_bytes, others, delete)


def _place(root: str, to: str) -> PurePosixPath:
    """``to`` below ``root``; the folders that the agent keeps there are its own."""
    relative = PurePosixPath(to)
    if relative.is_absolute():
        if not relative.is_relative_to(root):
            raise UsageError(f"{to} is not below the container's root {root}.", "Give a path relative to it.")
        relative = relative.relative_to(root)
    if not relative.parts or ".." in relative.parts or "\0" in to:
        raise UsageError(f"{to!r} is no place below the container's root.", "For example: data/train.jsonl.")
    if relative.parts[0] in OWN:
        raise UsageError(
            f"{relative.parts[0]}/ below {root} belongs to the tool.",
            "For example: data/train.jsonl, models/mine.",
        )
    return PurePosixPath(root) / relative


def _real_place(
    container: Container, place: PurePosixPath, files: Mapping[str, _Source], is_folder: bool
) -> PurePosixPath:
    """``place`` with the links on the way to it followed, none of which may lead to where nothing may be put."""
    folders = sorted({(place / name).parent for name in files} | ({place} if is_folder else set()))
    root, *targets = resolved(container, [container.settings.root, *map(str, folders)])
    real = dict(zip(folders, targets, strict=True))
    for folder, target in real.items():
        if str(folder) == container.settings.root:
            continue
        try:
            _place(root, target)
        except UsageError as error:
            raise UsageError(
                f"{folder} leads by a symbolic link to {target} in {container}: {error.message}",
                "Put it where the link is not, or mount what it leads to there (pct set … --mp0 …).",
            ) from None
    return PurePosixPath(real[place]) if is_folder else PurePosixPath(real[place.parent]) / place.name


def _refuse_what_is_in_the_way(
    to: str, source: Path, files: Mapping[str, _Source], there: Mapping[str, Entry], is_folder: bool
) -> None:
    here = there.get("")
    if is_folder and here is not None and here.kind != "d":
        raise UsageError(f"{to} is no folder in the container.", "Name another place, or remove it there.")
    for name in files:
        entry = there.get(name)
        where = f"{to.rstrip('/')}/{name}" if name else to
        if entry is not None and entry.kind == "d":
            hint = (
                f"Give the file's own place: {to.rstrip('/')}/{source.name}"
                if not name
                else "Remove it there."
            )
            raise UsageError(f"{where} is a folder in the container.", hint)
        if entry is not None and entry.kind not in "fl":
            raise UsageError(
                f"{where} is no regular file in the container.", "Remove it there, or name another place."
            )


def _same(
    container: Container, place: PurePosixPath, files: Mapping[str, _Source], there: Mapping[str, Entry]
) -> set[str]:
    """The names of the files that are there already. A link is not: what it leads to is not ours to judge."""
    alike = [
        name
        for name, file in files.items()
        if name in there and there[name].kind == "f" and there[name].size == file.size
    ]
    size_bytes = sum(files[name].size for name in alike)
    found = hashes(container, (str(place / name) for name in alike), size_bytes=size_bytes)
    return {name for name in alike if found.get(str(place / name)) == _sha256(files[name].path)}


def _others(files: Mapping[str, _Source], there: Mapping[str, Entry]) -> tuple[str, ...]:
    """What lies there besides the files, without folders and without what is on its way from another ``put``."""
    ours = set(files) | _folders_of(files)
    return tuple(
        name
        for name, entry in sorted(there.items())
        if name not in ours and entry.kind != "d" and not PurePosixPath(name).name.startswith(PARTIAL_PREFIX)
    )


def _remove(
    container: Container, place: PurePosixPath, files: Mapping[str, _Source], others: tuple[str, ...]
) -> None:
    """Remove ``others``, and the folders that held nothing else."""
    emptied = sorted(
        _folders_of(others) - _folders_of(files), key=lambda name: -len(PurePosixPath(name).parts)
    )
    remove(container, (str(place / name) for name in others), (str(place / name) for name in emptied))


def _folders_of(names: Iterable[str]) -> set[str]:
    """All folders on the way to the names, without the one that they are relative to."""
    return {str(folder) for name in names for folder in PurePosixPath(name).parents} - {"."}


def _files(source: Path) -> dict[str, _Source]:
    """The regular files of ``source`` by their path relative to it, in order; a file by the name ``""``."""
    if source.is_file():
        return {"": _described(source)}
    if not source.is_dir():
        if source.exists():
            raise UsageError(f"{source} is neither a regular file nor a folder.", "Write it to a file first.")
        raise UsageError(f"There is no file or folder {source}.", "Name one of the desk.")
    found: dict[str, _Source] = {}
    try:
        for folder, folders, names in os.walk(source, onerror=_refuse_unreadable):
            for path in [Path(folder, name) for name in names + folders]:
                if path.is_file():
                    found[path.relative_to(source).as_posix()] = _described(path)
                elif path.is_symlink() or not path.is_dir():
                    raise UsageError(
                        f"{path} is neither a file nor a folder of {source}: it would be left out.",
                        "Put what it leads to by itself, or take it out of the folder.",
                    )
    except OSError as error:
        raise _unreadable(error) from None
    if not found:
        raise UsageError(f"The folder {source} holds no file.")
    return dict(sorted(found.items()))


def _described(path: Path) -> _Source:
    status = path.stat()
    return _Source(path, status.st_size, bool(status.st_mode & 0o100))


def _sha256(file: Path) -> str:
    try:
        return file_sha256(file)
    except OSError as error:
        raise _unreadable(error) from None


def _refuse_unreadable(error: OSError) -> None:
    raise error


def _unreadable(error: OSError) -> UsageError:
    return UsageError(f"{error.filename} cannot be read: {error.strerror}.")
