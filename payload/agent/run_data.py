"""Which of the data beside the runs a run uses: written by its trainer, read by who wants data removed."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, NamedTuple, Optional

from payload.agent import durable

KINDS = ("answers", "packed", "features")
"""The folders of the layout that hold such data. What a run uses of each has one name."""
_FILE = "data.json"


class RunData(NamedTuple):
    """Names by kind; ``complete`` once no other can be added."""

    names: Dict[str, str]
    complete: bool


def note_run_data(run_dir: Path, complete: bool, **paths: Optional[Path]) -> None:
    """Write down what the run uses: of each kind the file or folder, or None. What was noted before is replaced."""
    names = {kind: path.stem for kind, path in paths.items() if path is not None}
    durable.write_json(run_dir / _FILE, {"names": names, "complete": complete})


def read_run_data(run_dir: Path) -> RunData:
    """What was noted; of a run that noted nothing, or nothing that can be read, nothing."""
    try:
        found = durable.read_json(run_dir / _FILE)
    except OSError:
        return RunData({}, False)
    names = found.get("names") if isinstance(found, dict) else None
    if not isinstance(names, dict):
        return RunData({}, False)
    return RunData({kind: str(names[kind]) for kind in KINDS if kind in names}, bool(found.get("complete")))
