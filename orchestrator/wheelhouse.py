"""Wheels for a container that has no internet: resolved by uv for the container's platform, fetched by pip, sent whole.

uv resolves with the same pins and settings as in the container and names every wheel with its hash; pip fetches just
those, since it knows the desk's certificates and proxies; the container installs from the folder alone.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import urllib.parse
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uv
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from orchestrator.answers import PlatformFacts
from orchestrator.console import StepReport
from orchestrator.container import Container
from orchestrator.desk_account import own_path
from orchestrator.errors import RefusedError, RemoteError
from orchestrator.settings import ContainerSettings, IndexSettings, TorchPin
from payload.agent.checksum import file_sha256
from payload.agent.redaction import redact

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OLDEST_MANYLINUX_GLIBC = 5


@dataclass(frozen=True)
class Platform:
    """What decides which wheels fit: machine (``x86_64``), glibc (``2.36``) and Python (``3.11.7``)."""

    machine: str
    glibc: tuple[int, int]
    python: str

    @property
    def uv_name(self) -> str:
        return f"{self.machine}-manylinux_{self.glibc[0]}_{self.glibc[1]}"

    @property
    def python_minor(self) -> str:
        return ".".join(self.python.split(".")[:2])

    @property
    def wheel_tags(self) -> list[str]:
        """Every platform tag that this machine takes, newest first."""
        minors = range(self.glibc[1], OLDEST_MANYLINUX_GLIBC - 1, -1)
        legacy = ("manylinux2014", "manylinux2010", "manylinux1")
        return [f"manylinux_2_{minor}_{self.machine}" for minor in minors] + [
            f"{name}_{self.machine}" for name in legacy
        ]

    @property
    def supported(self) -> list[Tag]:
        """Every wheel tag that this Python takes here, best first."""
        python = (int(self.python.split(".")[0]), int(self.python.split(".")[1]))
        interpreter = f"cp{python[0]}{python[1]}"
        return [
            *cpython_tags(python, platforms=self.wheel_tags),
            *compatible_tags(python, interpreter, self.wheel_tags),
        ]

    @property
    def is_the_desks(self) -> bool:
        return sys.platform == "linux" and os.uname().machine == self.machine


def container_platform(facts: PlatformFacts) -> Platform:
    """The platform that a container's facts describe. Raises :class:`RefusedError` without glibc."""
    libc, version = facts["libc"]
    if libc != "glibc":
        raise RefusedError(
            f"The container's C library is {libc or 'unknown'}, and torch's wheels need glibc.",
            "Use a container with a glibc distribution, such as Debian or Ubuntu.",
        )
    major, minor = (int(part) for part in re.findall(r"\d+", version)[:2])
    return Platform(facts["machine"], (major, minor), facts["python"]["version"])


def download_uv(platform: Platform, report: StepReport) -> Path:
    """A uv binary that runs on ``platform``: the desk's own, or that of the wheel for another machine."""
    if platform.is_the_desks:
        return Path(uv.find_uv_bin())
    folder = cache_folder() / f"uv-{uv_version()}-{platform.machine}"
    binary = folder / "uv"
    if binary.exists():
        return binary
    report.update(f"fetching uv for {platform.machine}")
    _pip_download(platform, f"uv=={uv_version()}", "uv", folder)
    wheel = next(folder.glob("uv-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith("/scripts/uv"))
        partial = binary.with_suffix(".part")
        partial.write_bytes(archive.read(member))
    partial.replace(binary)
    return binary


def uv_version() -> str:
    """The pinned uv's version, which the desk and every container share."""
    return importlib.metadata.version("uv")


def download_wheels(
    settings: ContainerSettings, platform: Platform, requirements: Path, report: StepReport
) -> list[Path]:
    """All wheels of the pinned torch and ``requirements`` for ``platform``, fetched once and kept at the desk.

    Raises :class:`RemoteError` with uv's or pip's own words when one cannot be had.
    """
    report.update("resolving the wheels for the container")
    locked = resolve_wheels(settings.torch, settings.index, platform, requirements)
    folder = cache_folder() / "wheels" / f"{platform.uv_name}-{platform.python_minor}"
    folder.mkdir(parents=True, exist_ok=True)
    missing = [wheel for wheel in locked if not _has(folder, wheel)]
    for number, wheel in enumerate(missing):
        report.update(f"fetching {wheel.name}", number, len(missing))
        _pip_download(platform, f"{wheel.url}#sha256={wheel.sha256}", wheel.name, folder, settings.index)
    return [folder / wheel.name for wheel in locked]


@dataclass(frozen=True)
class LockedWheel:
    """One wheel of a resolution: its file name, where it comes from, and its SHA-256 in hex."""

    name: str
    url: str
    sha256: str


def resolve_wheels(
    torch: TorchPin, index: IndexSettings, platform: Platform, requirements: Path
) -> list[LockedWheel]:
    """Which wheels uv would install in the container. Raises :class:`RemoteError` in uv's words."""
    argv = [
        *(
            uv.find_uv_bin(),
            "pip",
            "compile",
            "--no-config",
            "--quiet",
            "--no-header",
            "--format",
            "pylock.toml",
        ),
        *(
            "--only-binary",
            ":all:",
            "--python-platform",
            platform.uv_name,
            "--python-version",
            platform.python_minor,
        ),
        *index_arguments(index),
        *(("--torch-backend", torch.backend) if torch.backend and not torch.index_url else ()),
        *("-", str(requirements)),
    ]
    done = subprocess.run(
        argv,
        input=f"torch=={torch.version}\n",
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | index_environment(index, torch.index_url),
        check=False,
    )
    if done.returncode != 0:
        raise RemoteError(
            f"uv cannot resolve the wheels for the container: {_tail(done.stderr)}",
            "Correct torch: or index: in the inventory.",
        )
    locked = tomllib.loads(done.stdout)
    ranks = {tag: rank for rank, tag in enumerate(platform.supported)}
    return [_best_wheel(package, ranks) for package in locked["packages"]]


def send_wheels(container: Container, wheels: Sequence[Path], report: StepReport) -> str:
    """Bring the wheels to the container's wheelhouse, those that are missing; returns its path there."""
    folder = f"{container.settings.root}/wheelhouse"
    total = sum(wheel.stat().st_size for wheel in wheels)
    done = 0
    there = container.sha256_in(folder, [wheel.name for wheel in wheels], size_bytes=total)
    for wheel in wheels:
        path = f"{folder}/{wheel.name}"
        if there.get(wheel.name) != file_sha256(wheel):
            container.upload(wheel, path, on_progress=report.part_of(f"sending {wheel.name}", done, total))
        done += wheel.stat().st_size
    return folder


def index_arguments(index: IndexSettings) -> list[str]:
    """uv's arguments for an inventory's indexes; their URLs go into :func:`index_environment`."""
    # As pip does: the best of all indexes, not the first that knows the name.
    strategy = ["--index-strategy", "unsafe-best-match"] if index.extra_index_urls else []
    return strategy + (["--offline", "--no-index"] if index.offline else [])


def index_environment(index: IndexSettings, first_index_url: str | None = None) -> dict[str, str]:
    """The environment in which uv and pip honour an inventory's indexes, certificates, proxies and patience.

    ``first_index_url`` is asked before all others.
    Not in argv: a URL may hold a password, and every user of a machine can read argv.
    """
    values = {
        "UV_FIND_LINKS": ",".join(_link_url(link) for link in index.find_links),
        "UV_DEFAULT_INDEX": index.index_url,
        "UV_INDEX": " ".join(url for url in (first_index_url, *index.extra_index_urls) if url),
        "SSL_CERT_FILE": index.certificate,
        "HTTP_PROXY": index.http_proxy,
        "HTTPS_PROXY": index.https_proxy,
        "NO_PROXY": index.no_proxy,
        "UV_HTTP_TIMEOUT": str(index.timeout_s),
    }
    return {key: value for key, value in values.items() if value}


def _link_url(link: str) -> str:
    """A find-links folder or URL as one item of a list that commas separate."""
    return (link if "://" in link else Path(link).absolute().as_uri()).replace(",", "%2C")


def _best_wheel(package: Mapping[str, Any], ranks: Mapping[Tag, int]) -> LockedWheel:
    """Of the wheels that uv lists for a package, the one that an installer would take: the lowest rank."""
    fitting = []
    for wheel in package.get("wheels") or []:
        url = str(wheel.get("url") or Path(wheel["path"]).resolve().as_uri())
        name = urllib.parse.unquote(url.rsplit("/", 1)[1])
        *_, tags = parse_wheel_filename(name)
        rank = min((ranks[tag] for tag in tags if tag in ranks), default=None)
        if rank is not None:
            fitting.append((rank, LockedWheel(name, url, str(wheel["hashes"]["sha256"]))))
    if not fitting:
        raise RemoteError(
            f"{package['name']} {package.get('version', '')} has no wheel for the container's platform.",
            "Pin a version that has one, or build in a container with internet.",
        )
    return min(fitting, key=lambda found: found[0])[1]


def _pip_download(
    platform: Platform, requirement: str, name: str, folder: Path, index: IndexSettings | None = None
) -> None:
    """Fetch one wheel into ``folder``. The requirement goes into a private file: its URL may hold a password."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    argv += ["--only-binary=:all:", "--python-version", platform.python_minor, "--implementation", "cp"]
    argv += [part for tag in platform.wheel_tags for part in ("--platform", tag)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as wanted:
        wanted.write(f"{requirement}\n")
        wanted.flush()
        done = subprocess.run(
            [*argv, "--dest", str(folder), "--requirement", wanted.name],
            capture_output=True,
            text=True,
            timeout=3600,
            env=os.environ | (index_environment(index) if index else {}),
            check=False,
        )
    if done.returncode != 0:
        raise RemoteError(
            f"pip cannot fetch {name}: {_tail(done.stderr)}", "Try again when the network is there."
        )


def _has(folder: Path, wheel: LockedWheel) -> bool:
    path = folder / wheel.name
    return path.is_file() and file_sha256(path) == wheel.sha256


def cache_folder() -> Path:
    """Where the desk keeps what it can fetch or make again: wheels, uv for other machines, compiled artifacts."""
    return own_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dflash"


def _tail(text: str) -> str:
    lines = [line.strip() for line in redact(text).splitlines() if line.strip()]
    return " ".join(lines[-6:])[-800:] or "it gave no reason"
