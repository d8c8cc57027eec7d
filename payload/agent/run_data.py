"""Which of the data beside the runs a run uses: written by its trainer, read by who wants data removed."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, NamedTuple, Optional

from payload.agent import durable
from payload.errors import PayloadError

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


def read_run_data(run_dir: Path) -> Optional[RunData]:
    """What was noted, None when nothing was. Raises PayloadError when it cannot be read."""
    path = run_dir / _FILE
    try:
        found = durable.read_json(path)
        names = {kind: str(found["names"][kind]) for kind in KINDS if kind in found["names"]}
        return RunData(names, bool(found["complete"]))
    except FileNotFoundError:
        return None
    except (OSError, TypeError, KeyError) as error:
        raise PayloadError(
            f"{path} cannot be read: {error}", "Move that run's folder out of the way."
        ) from None
