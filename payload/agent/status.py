"""Verb ``status``: the runs of this container and what it holds."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import BinaryIO, List, Optional

from payload.agent import durable, state
from payload.agent.checkpoints import whole_checkpoints
from payload.agent.layout import Layout, active_name
from payload.agent.protocol import Events, Json, Request
from payload.agent.system import gpus
from payload.errors import PayloadError

_METRICS_TAIL_BYTES = 64 * 1024
# An evaluation's line may lie hundreds of steps' lines before the last.
_EVALUATIONS_TAIL_BYTES = 4 * 1024 * 1024
_ACCEPTED = "accepted_length"
# The metrics of all others are read for their last lines alone: a container may have hundreds of runs.
_NEWEST_RUNS = 10
_LAST_LINES_BYTES = 4 * 1024
# Counting a large cache must not make a status slow.
_COUNT_DEADLINE_S = 1.0


def status(request: Request, events: Events) -> Json:
    """Verb: one run (``run_id``) or all, newest first; the release and venv in use; caches, disk, GPUs.

    A run's ``checkpoints`` are the steps of its whole ones, ``steps`` how many its recipe asks for, and ``resumed`` the
    run from whose checkpoint it went on. ``left`` is the pids of a job that goes on although its run is lost, and empty
    for every other run. ``last_metrics`` of an older run that is over are those of its last lines alone. With
    ``runs_only``, nothing else is looked at: counting caches and asking the driver take a second each.
    """
    layout = Layout.at(request.root)
    run_id = request.get("run_id", str)
    wanted = [state.resolve(layout, run_id)] if run_id is not None else state.run_ids(layout)[::-1]
    runs = [_describe(layout, name, is_new=number < _NEWEST_RUNS) for number, name in enumerate(wanted)]
    if request.get("runs_only", bool):
        return {"runs": runs}
    return {
        "runs": runs,
        "release": active_name(layout.current),
        "venv": active_name(layout.venv_link),
        "caches": _caches(layout),
        "disk": disk(layout.root),
        "gpus": gpus() or [],
    }


def disk(folder: Path) -> Optional[Json]:
    """Bytes of the file system that holds ``folder``; None when it is not there."""
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        total, unused = found.f_blocks * found.f_frsize, found.f_bfree * found.f_frsize
        return {
            "total_bytes": total,
            "used_bytes": total - unused,
            # Without what the file system keeps for root.
            "free_bytes": found.f_bavail * found.f_frsize,
        }
    return None


def _describe(layout: Layout, run_id: str, *, is_new: bool) -> Json:
    run_dir = layout.run(run_id)
    try:
        run = state.current(layout, run_id)
        spec = durable.read_json(run_dir / state.SPEC_FILE)
    except (OSError, PayloadError) as error:
        return {"run_id": run_id, "state": "failed", "reason": f"cannot be read: {error}", "left": []}
    left = state.left_behind(layout, run)
    recipe = _object(spec.get("recipe"))
    return {
        "run_id": run_id,
        "recipe": recipe.get("name"),
        "steps": _object(recipe.get("train")).get("steps"),
        "resumed": Path(str(spec["resume_from"])).name if spec.get("resume_from") else None,
        "checkpoints": whole_checkpoints(run_dir),
        "state": run.state,
        "created_at": run.created_at,
        "started_at": run.started_at,
        "ended_at": run.ended_at,
        "exit_code": run.exit_code,
        "pid": run.job.pid if run.job is not None else None,
        "reason": run.reason,
        "hint": state.hint(run, left),
        "left": sorted(process.pid for process in left),
        "release": spec.get("release"),
        "venv": spec.get("venv"),
        "cache": spec.get("cache"),
        "last_metrics": _last_metrics(
            run_dir / state.METRICS_FILE, thoroughly=is_new or run.state in state.ACTIVE or bool(left)
        ),
        "log_bytes": _size(run_dir / state.OUTPUT_FILE),
    }


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _last_metrics(path: Path, *, thoroughly: bool) -> Optional[Json]:
    """The newest value of each metric in the last lines that can be read, or None.

    Lines of different kinds follow each other (a step's, a held-out evaluation's), so the last one alone lacks some:
    ``thoroughly`` looks further back.
    """
    newest: Json = {}
    with contextlib.suppress(OSError), path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - (_METRICS_TAIL_BYTES if thoroughly else _LAST_LINES_BYTES)))
        for line in file.read().split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):
                metrics = json.loads(line)
                if isinstance(metrics, dict):
                    newest.update((name, value) for name, value in metrics.items() if value is not None)
        if thoroughly and newest and _ACCEPTED not in newest:
            newest.update(_last_accepted(file, end))
    return newest or None


def _last_accepted(file: BinaryIO, end: int) -> Json:
    """The last held-out accepted length in the last megabytes of the metrics, which may be none."""
    file.seek(max(0, end - _EVALUATIONS_TAIL_BYTES))
    content = file.read()
    while (found := content.rfind(f'"{_ACCEPTED}"'.encode("ascii"))) >= 0:
        start = content.rfind(b"\n", 0, found) + 1
        with contextlib.suppress(ValueError, TypeError):
            value = json.loads(content[start:].split(b"\n", 1)[0])[_ACCEPTED]
            if value is not None:
                return {_ACCEPTED: value}
        content = content[:start]
    return {}


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _caches(layout: Layout) -> List[Json]:
    deadline = time.monotonic() + _COUNT_DEADLINE_S
    if not layout.caches.is_dir():
        return []
    entries = sorted(entry for entry in layout.caches.iterdir() if entry.is_dir())
    return [{"name": entry.name, "bytes": _tree_bytes(entry, deadline)} for entry in entries]


def _tree_bytes(folder: Path, deadline: float) -> Optional[int]:
    """The bytes of all files below ``folder``; None when counting takes longer than ``deadline`` allows."""
    total = 0
    for parent, _, names in os.walk(folder):
        if time.monotonic() > deadline:
            return None
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(parent) / name).lstat().st_size
    return total
