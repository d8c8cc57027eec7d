"""What an inventory can say of a host and of a container: names, types, defaults, and what a value must be."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Annotated, Any

from orchestrator.container_id import is_container_id
from payload.yaml_binding import Shorthand, at_least, at_most, require

MOST_GPUS = 1024
DEFAULT_CONTAINER_PATH = (
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
)


def _matching(pattern: str, problem: str) -> Callable[[str], str]:
    return require(re.compile(pattern).fullmatch, problem)


def _folder_of_its_own(root: str) -> str:
    path = PurePosixPath(root)
    if not path.is_absolute() or len(path.parts) < 3 or ".." in path.parts or "\0" in root:
        raise ValueError("an absolute folder of its own, such as /opt/dflash")
    return str(path)


def _variables(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise ValueError(f"{name!r} cannot be set in an environment")
    return env


def _gpu_range(value: Any) -> tuple[int, ...]:
    """``0-4`` and ``[0, 1, 2, 3, 4]`` are the same, and ``4`` and ``[4]``."""
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", str(value))
    if not match:
        raise ValueError("GPU numbers as a list, or a range such as 0-4")
    first, last = int(match[1]), int(match[2] or match[1])
    if last - first >= MOST_GPUS:
        raise ValueError(f"a range of more than {MOST_GPUS} GPUs")
    return tuple(range(first, last + 1))


def _container_id(key: str) -> str:
    if re.fullmatch(r"0[0-7]+", key):
        raise ValueError("YAML reads a number that begins with 0 as an octal one")
    if not is_container_id(key):
        raise ValueError("not a container's id: Proxmox numbers them from 100")
    return key


def _roles_fit_the_gpus(container: ContainerSettings) -> ContainerSettings:
    if (container.targets is None) != (container.drafters is None):
        raise ValueError("targets and drafters go together")
    for role, gpus in (("targets", container.targets), ("drafters", container.drafters)):
        if gpus is None:
            continue
        if not gpus or len(set(gpus)) != len(gpus):
            raise ValueError(f"{role}: at least one GPU, and none twice")
        if container.gpus and max(gpus) >= container.gpus:
            raise ValueError(
                f"{role}: GPU {max(gpus)} of a container that has {container.gpus} (0-{container.gpus - 1})"
            )
    return container


Count = Annotated[int, at_least(0)]
Gpus = Annotated[tuple[Count, ...], Shorthand(_gpu_range)]
Word = Annotated[str, _matching(r"[A-Za-z0-9_./][^\s=\0]*", "a name or path without spaces")]
_FINITE = require(math.isfinite, "a finite number is needed")
_POSITIVE = require(lambda value: value > 0, "the number is too small")


@dataclass(frozen=True)
class TorchPin:
    """The one torch build that a venv may hold.

    ``backend`` names the build's index by uv's ``--torch-backend`` (``cu128``, ``cpu``); null takes torch from the
    ordinary indexes and find-links. ``index_url`` replaces the backend's own index by a mirror of it. ``cuda`` and
    ``git`` (``torch.version.cuda`` and ``torch.version.git_version``, or a prefix of it) are checked after the
    install when they are set; without ``cuda``, what the backend's name says is checked.
    """

    version: Annotated[
        str,
        _matching(r"\d+\.\d+\.\d+([A-Za-z0-9.+]*)", "an exact version such as 2.11.0, without operators"),
    ] = "2.11.0"
    backend: (
        Annotated[str, _matching(r"[a-z]+[a-z0-9.]*", "a backend such as cu128, cu130 or cpu")] | None
    ) = "cu128"
    index_url: str | None = None
    cuda: str | None = None
    git: (
        Annotated[str, _matching(r"[0-9a-f]{7,40}", "7 to 40 hex digits of torch.version.git_version")] | None
    ) = None


@dataclass(frozen=True)
class IndexSettings:
    """Where packages come from: what uv in the container is told of indexes, certificates and proxies."""

    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    certificate: str | None = None
    http_proxy: str | None = None
    https_proxy: str | None = None
    no_proxy: str | None = None
    timeout_s: Annotated[int, _POSITIVE] = 300
    offline: bool = False


@dataclass(frozen=True)
class ContainerSettings:
    """One LXC container and what is pinned in it."""

    root: Annotated[str, _folder_of_its_own] = "/opt/dflash"
    python: Word = "python3"
    path: tuple[str, ...] = DEFAULT_CONTAINER_PATH
    home: Word = "/root"
    recipe: str = "qwen3-8b"
    gpus: Count = 0
    targets: Gpus | None = None
    drafters: Gpus | None = None
    torch: TorchPin = TorchPin()
    index: IndexSettings = IndexSettings()
    env: Annotated[dict[str, str], _variables] = field(default_factory=dict)


CheckedContainer = Annotated[ContainerSettings, _roles_fit_the_gpus]


@dataclass(frozen=True)
class HostSettings:
    """One Proxmox host and how to reach it."""

    address: str | None = None
    port: Annotated[int, at_least(1), at_most(65535)] | None = None
    user: str = "root"
    identity_file: str | None = None
    known_hosts: str | None = None
    pct: str = "/usr/sbin/pct"
    sudo: bool | None = None
    connect_timeout_s: Annotated[float, _FINITE, _POSITIVE, at_most(600)] = 10.0
    silence_timeout_s: Annotated[float, _FINITE, at_least(1), at_most(600)] = 15.0
    containers: dict[Annotated[str, _container_id], CheckedContainer] = field(default_factory=dict)
