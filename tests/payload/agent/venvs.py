"""What a test asks of the agent to have a venv built, and how it looks at one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import uv

from tests.payload.agent.container import FakeContainer

PIN = {"version": "2.11.0+cu128", "cuda": "12.8", "git": "70d99e998b"}


def request(wheels: Path | None, **changes: Any) -> dict[str, Any]:
    """The fields of `venv` for a container without internet."""
    return {
        "python": sys.executable,
        "uv": uv.find_uv_bin(),
        "requirements": "# a lock\nneedy==1.0  # with a comment\n",
        "torch": PIN,
        "index": {},
        "wheelhouse": str(wheels) if wheels else None,
        "imports": ["needy"],
        "force": False,
        **changes,
    }


def in_use(container: FakeContainer) -> str:
    return (container.root / "venv").resolve().name


def is_clean(container: FakeContainer) -> bool:
    return not [path for path in (container.root / "venvs").iterdir() if path.name.startswith(".")]
