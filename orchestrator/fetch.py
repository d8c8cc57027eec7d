"""Fetch: a run's metrics, log and complete checkpoints at home, each verified by hash."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from orchestrator.agent import Agent
from orchestrator.console import StepReport
from orchestrator.container import Container, file_sha256
from orchestrator.errors import RemoteError
from orchestrator.records import mark_fetched


@dataclass(frozen=True)
class Fetched:
    """What came home. ``new_files`` counts those that were not there yet, ``size_bytes`` is theirs."""

    folder: Path
    files: int
    new_files: int
    size_bytes: int


def fetch(container: Container, agent: Agent, run_id: str, folder: Path, report: StepReport) -> Fetched:
    """Bring the files of ``run_id`` to ``folder/<run id>/``; what is there with the right hash stays.

    Raises :class:`RemoteError` when a file's name would leave the folder or its bytes are not those listed.
    """
    home = folder / run_id
    listing = agent.call("files", {"run_id": run_id}, on_event=report.on_event)["files"]
    total = sum(int(file["size"]) for file in listing)
    done = new_files = new_bytes = 0
    for file in listing:
        path = PurePosixPath(str(file["path"]))
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise RemoteError(
                f"{container} lists a file outside the run: {path}.", "Nothing of it was written."
            )
        size, sha256 = int(file["size"]), str(file["sha256"])
        destination = home / path
        if not _is_same(destination, size, sha256):
            container.download(
                f"{container.settings.root}/runs/{run_id}/{path}",
                destination,
                size=size,
                sha256=sha256,
                on_progress=report.part_of(str(path), done, total),
            )
            new_files += 1
            new_bytes += size
        done += size
    mark_fetched(run_id, home)
    return Fetched(home, len(listing), new_files, new_bytes)


def _is_same(path: Path, size: int, sha256: str) -> bool:
    return path.is_file() and path.stat().st_size == size and file_sha256(path) == sha256
