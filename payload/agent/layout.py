"""Where things lie in the container: every path is under one root, and every name is checked first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Set

from payload.errors import PayloadError

PARTIAL_PREFIX = ".dflash-partial-"
"""How the name of a file begins that is on its way from the desk: it lies beside its place, wherever that is."""

OWN = (
    "releases", "current", "venvs", "venv", "cache", "uv-cache", "runs", "locks", "incoming", "tools", "wheelhouse",
    "python", "uncached", "answers", "features", "targets", "packed",
)  # fmt: skip
"""All that is made below the root for the tool itself. Every other name there is the user's."""

_CONTENT_NAME = re.compile(r"[0-9a-f]{16}")
_FREE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MODULE = re.compile(r"payload(\.[A-Za-z_][A-Za-z0-9_]*)+")


def _checked(name: str, pattern: re.Pattern[str], what: str) -> str:
    if not pattern.fullmatch(name):
        raise PayloadError(f"{name!r} is not a name of a {what} (expected {pattern.pattern})", kind="usage")
    return name


def checked_module(name: str) -> str:
    """``name``, when it is a module of the payload. Raises PayloadError of kind ``usage``."""
    return _checked(name, _MODULE, "module of the payload")


@dataclass(frozen=True)
class Layout:
    """The folders under one root. Made by :meth:`at`."""

    root: Path

    @classmethod
    def at(cls, root: str) -> Layout:
        """The layout under ``root``: an absolute path, at least two levels deep, without ``..``."""
        path = PurePosixPath(root)
        if not path.is_absolute() or ".." in path.parts or "\0" in root or len(path.parts) < 3:
            raise PayloadError(
                f"the root {root!r} cannot be used",
                "Give a folder of its own, like /opt/dflash.",
                kind="usage",
            )
        return cls(Path(path))

    @property
    def releases(self) -> Path:
        return self.root / "releases"

    @property
    def current(self) -> Path:
        """The link to the release in use."""
        return self.root / "current"

    @property
    def venvs(self) -> Path:
        return self.root / "venvs"

    @property
    def venv_link(self) -> Path:
        """The link to the venv in use."""
        return self.root / "venv"

    @property
    def caches(self) -> Path:
        return self.root / "cache"

    @property
    def uv_cache(self) -> Path:
        return self.root / "uv-cache"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def locks(self) -> Path:
        return self.root / "locks"

    @property
    def incoming(self) -> Path:
        return self.root / "incoming"

    @property
    def tools(self) -> Path:
        """uv, as the desk sent it."""
        return self.root / "tools"

    @property
    def wheelhouse(self) -> Path:
        """Wheels that the desk sent."""
        return self.root / "wheelhouse"

    @property
    def python(self) -> Path:
        """Interpreters that uv fetched."""
        return self.root / "python"

    @property
    def uncached(self) -> Path:
        """Where torch compiles what belongs to no compile cache."""
        return self.root / "uncached"

    @property
    def answers(self) -> Path:
        """A target's answers to training prompts (``data.regenerate``), used again by later runs."""
        return self.root / "answers"

    @property
    def packed(self) -> Path:
        """Training sets, encoded and packed, used again by later runs."""
        return self.root / "packed"

    @property
    def features(self) -> Path:
        """A target's features of training rows (``data.features: offline``), used again by later runs."""
        return self.root / "features"

    @property
    def targets(self) -> Path:
        """The demo's target."""
        return self.root / "targets"

    @property
    def own(self) -> Set[Path]:
        """The paths of :data:`OWN`."""
        return {self.root / name for name in OWN}

    def release(self, name: str) -> Path:
        return self.releases / _checked(name, _CONTENT_NAME, "release")

    def venv(self, name: str) -> Path:
        return self.venvs / _checked(name, _CONTENT_NAME, "venv")

    def cache(self, fingerprint: str) -> Path:
        return self.caches / _checked(fingerprint, _FREE_NAME, "compile cache")

    def run(self, run_id: str) -> Path:
        return self.runs / _checked(run_id, _FREE_NAME, "run")

    def archive(self, name: str) -> Path:
        return self.incoming / _checked(name, _FREE_NAME, "uploaded file")


def active_name(link: Path) -> str | None:
    """The name that ``current`` or ``venv`` points at, or None when it points at nothing that exists."""
    return link.resolve().name if link.exists() else None
