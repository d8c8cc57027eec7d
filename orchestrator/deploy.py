"""Deploy: the payload as one release whose name is the hash of what is in it.

Ask the agent of that release whether it is whole; if nobody answers, send the release as one archive that is its
own agent, and have it check, unpack and activate itself.
"""

from __future__ import annotations

import secrets
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent import Agent, NoAnswer
from orchestrator.console import StepReport
from orchestrator.container import Container
from orchestrator.errors import RemoteError
from orchestrator.retry import repeat
from payload.agent.release import build_archive, tree_hash

PAYLOAD = Path(__file__).resolve().parent.parent / "payload"


@dataclass(frozen=True)
class Deployed:
    """A release that is in the container and is the current one."""

    release: str
    already_there: bool
    size_bytes: int


@dataclass(frozen=True)
class Archive:
    """A release as it travels."""

    release: str
    content: bytes
    sha256: str


class Payload:
    """A payload tree at the desk, named and packed once for all containers that it goes to."""

    def __init__(self, folder: Path = PAYLOAD) -> None:
        self._folder = folder
        self._packing = threading.Lock()
        self._archive: Archive | None = None
        self.release = tree_hash(folder)

    def archive(self) -> Archive:
        """The release as one archive. Its name differs from :attr:`release` if the tree has changed meanwhile."""
        with self._packing:
            if self._archive is None:
                with tempfile.TemporaryDirectory(prefix="dflash-release-") as folder:
                    path = Path(folder) / "release.zip"
                    release, sha256, _ = build_archive(self._folder, path)
                    self._archive = Archive(release, path.read_bytes(), sha256)
            return self._archive


def deploy(container: Container, report: StepReport, payload: Payload | None = None) -> Deployed:
    """Bring ``payload`` (default: the desk's own) into the container, unless that very release is there.

    A broken link is tried again. Raises :class:`orchestrator.errors.OrchestratorError`; the release that was current
    before stays so then.
    """
    whole = payload or Payload()
    return repeat(lambda: _deploy(container, report, whole), "to deploy", container.connection.notify)


def _deploy(container: Container, report: StepReport, payload: Payload) -> Deployed:
    report.update(f"is release {payload.release} there?")
    agent = Agent.of_release(container, payload.release)
    try:
        agent.call("hello", {"release": payload.release, "activate": True})
    except (NoAnswer, RemoteError):
        pass
    else:
        return Deployed(payload.release, already_there=True, size_bytes=0)
    archive = payload.archive()
    path = f"{container.settings.root}/incoming/{archive.release}-{secrets.token_hex(8)}.zip"
    container.send(
        archive.content,
        path,
        mode=0o600,
        on_progress=lambda done, total: report.update("uploading", done, total),
    )
    size = len(archive.content)
    try:
        Agent(container, path).call(
            "receive",
            {"release": archive.release, "sha256": archive.sha256, "size": size},
            on_event=report.on_event,
        )
    except NoAnswer as error:
        # An archive that is cut off is no program that could say so.
        if container.sha256(path) == archive.sha256:
            raise
        container.run(["rm", "-f", path])
        raise RemoteError(
            f"{container}: release {archive.release} did not arrive whole: {size} bytes were sent.",
            "What came was removed, and the release in use stays so. Deploy again; if it happens again, look at the "
            "container's disk.",
        ) from error
    return Deployed(archive.release, already_there=False, size_bytes=size)
