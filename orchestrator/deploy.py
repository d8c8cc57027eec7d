"""Deploy: the payload as one release whose name is the hash of what is in it.

Ask the agent of that release whether it is whole; if nobody answers, send the release as one archive that is its
own agent, and have it check, unpack and activate itself.
"""

from __future__ import annotations

import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent import Agent, NoAnswer
from orchestrator.console import StepReport
from orchestrator.container import Container
from orchestrator.errors import RemoteError
from payload.agent.release import build_archive, tree_hash

PAYLOAD = Path(__file__).resolve().parent.parent / "payload"


@dataclass(frozen=True)
class Deployed:
    """A release that is in the container and is the current one."""

    release: str
    already_there: bool
    size_bytes: int


def deploy(container: Container, report: StepReport, payload: Path = PAYLOAD) -> Deployed:
    """Bring ``payload`` into the container, unless that very release is there.

    Raises :class:`orchestrator.errors.OrchestratorError`; the release that was current before stays so then.
    """
    release = tree_hash(payload)
    report.update(f"is release {release} there?")
    agent = Agent.of_release(container, release)
    try:
        agent.call("hello", {"release": release, "activate": True})
    except (NoAnswer, RemoteError):
        pass
    else:
        return Deployed(release, already_there=True, size_bytes=0)
    with tempfile.TemporaryDirectory(prefix="dflash-release-") as folder:
        archive = Path(folder) / "release.zip"
        release, sha256, size = build_archive(payload, archive)
        path = f"{container.settings.root}/incoming/{release}-{secrets.token_hex(8)}.zip"
        container.upload(
            archive, path, mode=0o600, on_progress=lambda done, total: report.update("uploading", done, total)
        )
        Agent(container, path).call(
            "receive", {"release": release, "sha256": sha256, "size": size}, on_event=report.on_event
        )
    return Deployed(release, already_there=False, size_bytes=size)
