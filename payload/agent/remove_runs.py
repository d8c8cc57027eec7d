"""Verb ``remove_runs``: runs that are over, with their checkpoints, metrics and log, when somebody asks for it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath
from typing import Dict, List, Mapping, Optional, Sequence

from payload.agent import durable, state
from payload.agent.layout import Layout
from payload.agent.locks import hold
from payload.agent.processes import is_alive
from payload.agent.protocol import Events, Json, Request
from payload.agent.usage import unused
from payload.errors import PayloadError


def remove_runs(request: Request, events: Events) -> Json:
    """Verb: remove the runs ``run_ids``, or all but the newest ``keep``; without ``apply`` only tell which they are.

    Never removed: a run that is going on or has a process left, one from whose checkpoint a run that stays went on or
    with whose drafter an active one began, and one that somebody reads at the moment. Of ``keep`` they just stay, and
    ``kept`` says why; of ``run_ids``, each is a refusal. The result: ``{"runs": [{"run_id", "state", "bytes"}],
    "kept": {run id: why}, "applied"}``.

    Raises PayloadError of kind ``busy`` while a run is being started, ``usage`` for an unknown run, ``refused`` for one
    that is needed. Nothing is removed then, nor when the spec of a run that stays cannot be read.
    """
    layout = Layout.at(request.root)
    asked, keep = request.get("run_ids", list), request.get("keep", int)
    if (asked is None) == (keep is None) or (keep is not None and keep < 0):
        raise PayloadError("the request names either runs, or how many of them to keep", kind="usage")
    with hold(layout, "jobs", "remove_runs", request.get("holder", str) or ""):
        every = state.run_ids(layout)
        for run_id in asked or ():
            state.load(layout.run(run_id))
        wanted = (
            [run_id for run_id in every if run_id in asked]
            if asked is not None
            else every[: len(every) - (keep or 0)]
        )
        kept = _needed(layout, every, wanted)
        if asked is not None and kept:
            raise PayloadError(
                "; ".join(f"run {run_id} stays: {why}" for run_id, why in kept.items()),
                "Nothing was removed.",
                kind="refused",
            )
        runs = [_described(layout, run_id) for run_id in wanted if run_id not in kept]
        if request.get("apply", bool):
            for leftover in durable.leftovers(layout.runs):
                durable.remove(leftover)
            runs = [run for run in runs if _removed(layout.run(run["run_id"]), events)]
    return {"runs": runs, "kept": kept, "applied": bool(request.get("apply", bool))}


def _needed(layout: Layout, every: Sequence[str], wanted: Sequence[str]) -> Dict[str, str]:
    """Those of ``wanted`` that stay, and why. What stays may need others, so it is asked until nothing changes."""
    kept = {run_id: why for run_id in wanted if (why := _use_of(layout, run_id))}
    specs = {run_id: _spec(layout, run_id) for run_id in every if run_id not in wanted or run_id in kept}
    while True:
        needed = {
            source: f"run {run_id} {how}"
            for run_id, spec in specs.items()
            for source, how in _sources(layout, run_id, spec).items()
            if source in wanted and source not in kept
        }
        if not needed:
            return {run_id: kept[run_id] for run_id in wanted if run_id in kept}
        kept.update(needed)
        specs.update((run_id, _spec(layout, run_id)) for run_id in needed)


def _use_of(layout: Layout, run_id: str) -> Optional[str]:
    """What a run is doing at the moment, or who reads it; None when it is over and nobody does."""
    try:
        found = state.current(layout, run_id)
    except PayloadError as error:
        return error.message
    if found.state in state.ACTIVE:
        return f"it is {found.state}"
    if state.processes(layout, found) or (found.supervisor is not None and is_alive(found.supervisor)):
        return "processes of it are still there"
    with unused(layout.run(run_id)) as free:
        return None if free else "it is being read"


def _sources(layout: Layout, run_id: str, spec: Mapping[str, object]) -> Dict[str, str]:
    """The runs that a run which stays needs, and for what."""
    found = {}
    if spec.get("resume_from"):
        found[PurePosixPath(str(spec["resume_from"])).name] = "went on from its checkpoint"
    recipe = spec.get("recipe")
    train = recipe.get("train") if isinstance(recipe, dict) else None
    initial = train.get("from_pretrained") if isinstance(train, dict) else None
    if initial and state.load(layout.run(run_id)).state in state.ACTIVE:
        place = layout.root / str(initial)
        if layout.runs in place.parents:
            found.setdefault(place.relative_to(layout.runs).parts[0], "begins with its drafter")
    return found


def _spec(layout: Layout, run_id: str) -> Mapping[str, object]:
    path = layout.run(run_id) / state.SPEC_FILE
    try:
        spec = durable.read_json(path)
    except OSError as error:
        raise PayloadError(
            f"{path} cannot be read: {error.strerror}", "Move that run's folder out of the way."
        ) from None
    return spec if isinstance(spec, dict) else {}


def _described(layout: Layout, run_id: str) -> Json:
    return {
        "run_id": run_id,
        "state": state.load(layout.run(run_id)).state,
        "bytes": tree_bytes(layout.run(run_id)),
    }


def tree_bytes(path: Path) -> int:
    """The size of a file, or of all files below a folder."""
    if path.is_file():
        return path.lstat().st_size
    sizes: List[int] = []
    for parent, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append((Path(parent) / name).lstat().st_size)
    return sum(sizes)


def _removed(run_dir: Path, events: Events) -> bool:
    """Remove a run, unless somebody has begun to read it."""
    with unused(run_dir) as free:
        if not free:
            events.note(f"run {run_dir.name} is being read: it stays")
            return False
        events.progress(f"removing run {run_dir.name}")
        durable.remove_wholly(run_dir)
    return True
