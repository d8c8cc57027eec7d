"""Verb ``prune``: remove releases, venvs and uploads that nothing needs any more."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Iterator, List, Set

from payload.agent import durable, state
from payload.agent.layout import PARTIAL_PREFIX, Layout, active_name
from payload.agent.locks import hold
from payload.agent.protocol import Events, Json, Request
from payload.agent.usage import unused
from payload.errors import PayloadError

# A younger upload may still be on its way.
_UPLOAD_AGE_S = 3600.0
_DEFAULT_KEEP = 2


def prune(request: Request, events: Events) -> Json:
    """Verb: keep what is in use, what any run pins, and the newest ``keep`` of releases and of venvs.

    Runs and compile caches are never removed, and neither is what a verb that is at work uses: it is named in a note.
    Raises PayloadError of kind ``busy`` while a release or a venv is being made or a run is being started.
    """
    layout = Layout.at(request.root)
    keep = request.get("keep", int)
    keep = _DEFAULT_KEEP if keep is None else keep
    if keep < 0:
        raise PayloadError(f"the request's keep is negative: {keep}", kind="usage")
    holder = request.get("holder", str) or ""
    removed = []
    with contextlib.ExitStack() as locks:
        for name in ("deploy", "venv", "jobs"):
            locks.enter_context(hold(layout, name, "prune", holder))
        for path in _superfluous(layout, keep):
            name = path.relative_to(layout.root).as_posix()
            with unused(path) as free:
                if free:
                    events.progress(f"removing {name}")
                    durable.remove(path)
                    removed.append(name)
                else:
                    events.note(f"{name} is in use: it stays")
    return {"removed": removed}


def _superfluous(layout: Layout, keep: int) -> Iterator[Path]:
    own = Path(__file__).resolve().parents[2].name
    pinned = _pinned(layout)
    for folder, link in ((layout.releases, layout.current), (layout.venvs, layout.venv_link)):
        yield from durable.leftovers(folder)
        yield from _surplus(folder, pinned | {own, active_name(link) or ""}, keep)
    yield from _old_uploads(layout)
    yield from _half_files(layout)


def _pinned(layout: Layout) -> Set[str]:
    """The releases and venvs that runs name."""
    names: Set[str] = set()
    for run_id in state.run_ids(layout):
        # A run whose spec cannot be read pins something unknown: then this raises, and nothing is removed.
        spec = durable.read_json(layout.run(run_id) / state.SPEC_FILE)
        names.update(str(spec[name]) for name in ("release", "venv") if spec.get(name))
    return names


def _surplus(folder: Path, needed: Set[str], keep: int) -> List[Path]:
    if not folder.is_dir():
        return []
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    entries.sort(key=lambda entry: entry.lstat().st_mtime, reverse=True)
    return [entry for entry in entries[keep:] if entry.name not in needed]


def _old_uploads(layout: Layout) -> Iterator[Path]:
    """What uploads left that were given up: all of ``incoming``, and elsewhere what was never put in place."""
    found = list(layout.incoming.iterdir()) if layout.incoming.is_dir() else []
    for folder in (layout.tools, layout.wheelhouse):
        found += durable.leftovers(folder)
    return filter(_is_given_up, found)


def _half_files(layout: Layout) -> Iterator[Path]:
    """What an interrupted `put` left, in whatever folder of the user's; links are not followed."""
    own = layout.own
    for parent, folders, names in os.walk(layout.root):
        folders[:] = [name for name in folders if Path(parent, name) not in own]
        halves = [Path(parent, name) for name in names if name.startswith(PARTIAL_PREFIX)]
        yield from filter(_is_given_up, halves)


def _is_given_up(upload: Path) -> bool:
    return time.time() - upload.lstat().st_mtime > _UPLOAD_AGE_S
