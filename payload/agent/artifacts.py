"""Verb ``files``: what of a run is complete and can be fetched, with its hashes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Iterator, List

from payload.agent import state
from payload.agent.layout import Layout
from payload.agent.protocol import Events, Json, Request

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
_PLAIN_FILES = (state.SPEC_FILE, state.STATE_FILE, state.OUTPUT_FILE, state.METRICS_FILE)
_CHUNK_BYTES = 4 * 1024 * 1024


def files(request: Request, events: Events) -> Json:
    """Verb: the complete things of a run: paths relative to its folder, sizes in bytes, SHA-256.

    A checkpoint is complete when its manifest is there, which is written last. A file that still grows is
    described as far as it was when it was looked at: the hash is of its first ``size`` bytes.
    """
    layout = Layout.at(request.root)
    run_dir = layout.run(state.resolve(layout, request.get("run_id", str)))
    found: List[Json] = []
    paths = [path for path in (run_dir / name for name in _PLAIN_FILES) if path.is_file()]
    paths += sorted(_checkpoint_files(run_dir / CHECKPOINTS))
    for number, path in enumerate(paths):
        relative = path.relative_to(run_dir).as_posix()
        events.progress(f"hashing {relative}", done=number, total=len(paths))
        found.append({"path": relative, **_measure(path)})
    return {"run_id": run_dir.name, "files": found}


def _checkpoint_files(checkpoints: Path) -> Iterator[Path]:
    if not checkpoints.is_dir():
        return
    for folder in checkpoints.iterdir():
        if folder.name.startswith(".") or folder.is_symlink() or not (folder / MANIFEST).is_file():
            continue
        yield from (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _measure(path: Path) -> Json:
    """``size`` now, and ``sha256`` of that many bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = size = path.stat().st_size
        while left > 0:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                break
            digest.update(chunk)
            left -= len(chunk)
    return {"size": size - left, "sha256": digest.hexdigest()}
