"""Fetch: a run's metrics, log and complete checkpoints at home, each verified by hash."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from orchestrator.agent import Agent
from orchestrator.answers import NAME, Files
from orchestrator.console import StepReport
from orchestrator.container import Container
from orchestrator.errors import RefusedError, RemoteError, UsageError
from orchestrator.records import mark_fetched
from payload.agent.checksum import file_sha256


@dataclass(frozen=True)
class Fetched:
    """What came home. ``new_files`` counts those that were not there yet, ``size_bytes`` is theirs."""

    folder: Path
    files: int
    new_files: int
    size_bytes: int


def fetch(container: Container, agent: Agent, run_id: str, folder: Path, report: StepReport) -> Fetched:
    """Bring the files of ``run_id`` to ``folder/<run id>/``; what is there with the right hash stays.

    A checkpoint that the job removes meanwhile (it keeps the last few) is left out. Raises :class:`RemoteError` when
    a file's name would leave the folder or its bytes are not those listed, :class:`RefusedError` while another fetch
    writes there, and :class:`UsageError` when ``run_id`` is none or the desk cannot write.
    """
    if not NAME.fullmatch(run_id):
        raise UsageError(f"{run_id}: not a run id.", "`status` lists the runs of a container.")
    home = folder / run_id
    listing = _listing(container, agent, run_id, report)
    total = sum(file.size for file in listing)
    done = new_files = new_bytes = 0
    gone: set[PurePosixPath] = set()
    with _only_fetch(home):
        for file in listing:
            destination = home / file.path
            checkpoint = _checkpoint(file.path)
            if checkpoint not in gone and not _is_same(destination, file):
                try:
                    container.download(
                        f"{container.settings.root}/runs/{run_id}/{file.path}",
                        destination,
                        size=file.size,
                        sha256=file.sha256,
                        on_progress=report.part_of(str(file.path), done, total),
                    )
                except RemoteError:
                    if checkpoint is None or file in _listing(container, agent, run_id, report):
                        raise
                    gone.add(checkpoint)
                    shutil.rmtree(home / checkpoint, ignore_errors=True)
                    report.note(f"{checkpoint} was removed by the job meanwhile: left out")
                else:
                    new_files += 1
                    new_bytes += file.size
            done += file.size
    mark_fetched(run_id, home)
    fetched = [file for file in listing if _checkpoint(file.path) not in gone]
    return Fetched(home, len(fetched), new_files, new_bytes)


@dataclass(frozen=True)
class _Listed:
    path: PurePosixPath
    size: int
    sha256: str


def _listing(container: Container, agent: Agent, run_id: str, report: StepReport) -> list[_Listed]:
    found = agent.ask(Files, "files", {"run_id": run_id}, on_event=report.on_event)
    return [_Listed(PurePosixPath(file["path"]), file["size"], file["sha256"]) for file in found["files"]]


def _checkpoint(path: PurePosixPath) -> PurePosixPath | None:
    """The folder of the checkpoint that a file belongs to."""
    return PurePosixPath(*path.parts[:2]) if path.parts[0] == "checkpoints" and len(path.parts) > 2 else None


@contextlib.contextmanager
def _only_fetch(home: Path) -> Iterator[None]:
    """Hold ``home`` for one fetch at a time: two would write into the same partial files."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(
            f"{home} cannot be written at the desk: {error.strerror}.", "Name another: TO=<folder>."
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise RefusedError(
            f"Another fetch is writing to {home}.", "Wait for its end, then fetch again."
        ) from None
    finally:
        os.close(descriptor)


def _is_same(path: Path, file: _Listed) -> bool:
    return path.is_file() and path.stat().st_size == file.size and file_sha256(path) == file.sha256
