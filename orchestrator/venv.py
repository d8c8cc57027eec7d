"""Venv: a clean environment in the container, built by uv beside the old one and switched to when it is verified."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.agent import Agent
from orchestrator.answers import PlatformFacts, Venv
from orchestrator.console import StepReport
from orchestrator.container import Container
from orchestrator.deploy import PAYLOAD
from orchestrator.wheelhouse import (
    Platform,
    container_platform,
    download_uv,
    download_wheels,
    send_wheels,
    uv_version,
)
from payload.agent.checksum import file_sha256

IMPORTS = (
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "yaml",
    "datasets",
    "tensorboard",
    "gguf",
    "accelerate",
)
"""One module of each package that the payload asks for: all must import before a venv is used."""

BUILD_IDLE_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class BuiltVenv:
    """A venv that is in the container, verified, and the current one."""

    venv: str
    created: bool
    torch_version: str
    torch_git: str


def build_venv(
    container: Container, agent: Agent, report: StepReport, *, wheelhouse: bool = False, force: bool = False
) -> BuiltVenv:
    """Make sure that the venv which the inventory pins is there and in use.

    ``wheelhouse`` sends every wheel from the desk, for a container without internet; ``force`` builds anew even
    when the venv is there. The compile cache is never touched, and the venv in use stays in use until the new one
    is verified. Raises :class:`orchestrator.errors.RefusedError` when what was installed is not what is pinned.
    """
    settings = container.settings
    request: dict[str, Any] = {
        "python": settings.python,
        "uv": None,
        "requirements": (PAYLOAD / "requirements.txt").read_text(encoding="utf-8"),
        "torch": asdict(settings.torch),
        "index": asdict(settings.index),
        "wheelhouse": None,
        "imports": list(IMPORTS),
        "force": force,
    }
    report.update("is the pinned venv there?")
    found = agent.ask(Venv, "venv", request | {"check": True}, on_event=report.on_event)
    if found["present"] and not force:
        return _built(found, created=False)
    platform = container_platform(agent.ask(PlatformFacts, "facts"))
    request["uv"] = _send_uv(container, platform, report)
    if wheelhouse:
        wheels = download_wheels(settings, platform, PAYLOAD / "requirements.txt", report)
        request["wheelhouse"] = send_wheels(container, wheels, report)
    built = agent.ask(Venv, "venv", request, on_event=report.on_event, idle_timeout_s=BUILD_IDLE_TIMEOUT_S)
    return _built(built, created=built["created"])


def _send_uv(container: Container, platform: Platform, report: StepReport) -> str:
    """Bring uv's binary along under a name that says its version and content; returns its path in the container."""
    binary = download_uv(platform, report)
    digest = file_sha256(binary)
    path = f"{container.settings.root}/tools/uv-{uv_version()}-{digest[:12]}"
    if container.sha256(path) != digest:
        container.upload(
            binary, path, mode=0o755, on_progress=lambda done, total: report.update("sending uv", done, total)
        )
    return path


def _built(result: Venv, *, created: bool) -> BuiltVenv:
    torch = result.get("torch") or {}
    return BuiltVenv(result["venv"], created, torch.get("version") or "?", torch.get("git") or "?")
