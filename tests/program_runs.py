"""Runs whose job is a small program instead of a training."""

from __future__ import annotations

import time
from typing import Any

from orchestrator.deploy import PAYLOAD
from payload.agent.release import tree_hash

VENV = "0123456789abcdef"


def spec(run_id: str, program: str, **changes: Any) -> dict[str, Any]:
    """A run's spec whose job is ``program``."""
    return {
        "run_id": run_id,
        "release": tree_hash(PAYLOAD),
        "venv": VENV,
        "cache": None,
        "command": ["-u", "-c", program],
        "env": {},
        "recipe": {},
        "nproc": 1,
        "created_at": time.time(),
        **changes,
    }
