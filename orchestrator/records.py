"""The desk's record of each run: where it runs, what it pins, and what came home.

One JSON file a run under ``$XDG_STATE_HOME/dflash/runs`` (``~/.local/state`` without it), written before the start
is asked for: a desk that dies in between still knows which run to look for.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from orchestrator.desk_account import own_path
from orchestrator.errors import UsageError

RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")


@dataclass(frozen=True)
class RunRecord:
    """One run as the desk knows it. Times are seconds since the epoch."""

    run_id: str
    host: str
    container: str
    recipe: str
    release: str
    venv: str
    cache: str | None
    asked_at: float
    fetched_to: str | None = None


def new_run_id() -> str:
    """A run id: UTC time, so that ids sort, and 24 random bits."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def records_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return own_path(state) / "dflash" / "runs"


def save_record(record: RunRecord) -> None:
    """Write a record, whole or not at all. Raises :class:`UsageError` when the desk cannot."""
    folder = records_folder()
    path = folder / f"{record.run_id}.json"
    partial = path.with_suffix(f".{secrets.token_hex(4)}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UsageError(
            f"The desk cannot keep a record of the run in {folder}: {error.strerror or error}.",
            "Set XDG_STATE_HOME to a folder that can be written. Nothing was started.",
        ) from None


def load_record(run_id: str) -> RunRecord | None:
    """The record of a run; None when this desk has none, or a damaged one."""
    try:
        return RunRecord(**json.loads((records_folder() / f"{run_id}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def mark_fetched(run_id: str, folder: Path) -> None:
    record = load_record(run_id)
    if record is not None:
        save_record(replace(record, fetched_to=str(folder)))
