"""Verb ``files``: what of a run is complete and can be fetched, with its hashes."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Iterator, List

from payload.agent import state
from payload.agent.checkpoints import CHECKPOINTS, MANIFEST
from payload.agent.layout import Layout
from payload.agent.protocol import Events, Json, Request

_PLAIN_FILES = (state.SPEC_FILE, state.STATE_FILE, state.OUTPUT_FILE, state.METRICS_FILE)
_CHUNK_BYTES = 4 * 1024 * 1024


def files(request: Request, events: Events) -> Json:
    """Verb: the complete things of a run: paths relative to its folder, sizes in bytes, SHA-256.

    A checkpoint is complete when its manifest is there, which is written last. Here too it is the last of its
    checkpoint's files, so that whoever fetches them in this order may go by the same rule; the newest checkpoint is
    the first. A file that still grows is described as far as it was when it was looked at: the hash is of its first
    ``size`` bytes.
    """
    layout = Layout.at(request.root)
    run_dir = layout.run(state.resolve(layout, request.get("run_id", str)))
    found: List[Json] = []
    paths = [path for path in (run_dir / name for name in _PLAIN_FILES) if path.is_file()]
    paths += _checkpoint_files(run_dir / CHECKPOINTS)
    for number, path in enumerate(paths):
        relative = path.relative_to(run_dir).as_posix()
        events.progress(f"hashing {relative}", done=number, total=len(paths))
        # The trainer removes old checkpoints meanwhile, the manifest first: without one, what is listed is none.
        with contextlib.suppress(FileNotFoundError):
            found.append({"path": relative, **_measure(path)})
    return {"run_id": run_dir.name, "files": found}


def _checkpoint_files(checkpoints: Path) -> Iterator[Path]:
    complete = []
    for folder in checkpoints.iterdir() if checkpoints.is_dir() else ():
        manifest = folder / MANIFEST
        if not folder.name.startswith(".") and not folder.is_symlink() and _is_plain(manifest):
            with contextlib.suppress(FileNotFoundError):
                complete.append((manifest.stat().st_mtime_ns, folder.name, folder))
    for _, _, folder in sorted(complete, reverse=True):
        manifest = folder / MANIFEST
        yield from sorted(path for path in folder.rglob("*") if _is_plain(path) and path != manifest)
        yield manifest


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


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
