"""Verb ``remove_data``: answers, training sets and features that no run can still need, when somebody asks for it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

from payload.agent import durable, state
from payload.agent.checkpoints import whole_checkpoints
from payload.agent.layout import Layout
from payload.agent.locks import hold
from payload.agent.protocol import Events, Json, Request
from payload.agent.remove_runs import tree_bytes
from payload.agent.run_data import KINDS, read_run_data
from payload.agent.usage import unused
from payload.errors import PayloadError


class _Item(NamedTuple):
    """One training set, or the features or answers of one: ``kind`` is the folder it lies in."""

    kind: str
    name: str
    paths: List[Path]


def remove_data(request: Request, events: Events) -> Json:
    """Verb: remove what lies in the folders ``kinds`` (of :data:`payload.agent.run_data.KINDS`); without ``apply``
    only tell what it is, as it would be without the runs ``gone``.

    What a run uses that is not finished stays: it goes on, or another may go on from it. The result: ``{"data":
    [{"kind", "name", "bytes", "runs": [run id that used it]}], "kept": {"kind/name": why}, "applied"}``.

    Raises PayloadError of kind ``busy`` while a run is being started or is preparing its data, ``refused`` when one
    that can be resumed does not say what it uses, and ``usage`` for an unknown kind.
    """
    layout = Layout.at(request.root)
    kinds = request.get("kinds", list) or []
    if not kinds or not all(kind in KINDS for kind in kinds):
        raise PayloadError(f"the request's kinds are not of {', '.join(KINDS)}: {kinds}", kind="usage")
    apply = bool(request.get("apply", bool))
    with hold(layout, "jobs", "remove_data", request.get("holder", str) or ""):
        runs_of, kept = _runs_by_data(layout, () if apply else request.get("gone", list) or ()), {}
        data: List[Json] = []
        for kind in kinds:
            for item in _items(layout.root / kind, kind):
                runs = runs_of.get((kind, item.name), {})
                needed = [why for why in runs.values() if why]
                if needed:
                    kept[f"{kind}/{item.name}"] = needed[0]
                    continue
                size = sum(map(tree_bytes, item.paths))
                if not apply or _removed(item, events):
                    data.append({"kind": kind, "name": item.name, "bytes": size, "runs": list(runs)})
    return {"data": data, "kept": kept, "applied": apply}


def _runs_by_data(layout: Layout, gone: Sequence[str]) -> Dict[Tuple[str, str], Dict[str, str]]:
    """For each (kind, name) the runs that use it, and why each still needs it: empty for one that is finished."""
    runs_of: Dict[Tuple[str, str], Dict[str, str]] = {}
    for run_id in state.run_ids(layout):
        if run_id in gone:
            continue
        run_dir = layout.run(run_id)
        now, data = state.current(layout, run_id), read_run_data(run_dir)
        goes_on = now.state in state.ACTIVE or bool(state.left_behind(layout, now))
        if goes_on and (data is None or not data.complete):
            raise PayloadError(
                f"run {run_id} is preparing its data", "Wait until it makes steps, or stop it.", kind="busy"
            )
        if data is None:
            if now.state != "finished" and whole_checkpoints(run_dir):
                raise PayloadError(
                    f"run {run_id} ({now.state}) can be resumed and does not say which data it uses",
                    f"make prune RUN_ID={run_id} removes the run; then nothing can need them.",
                    kind="refused",
                )
            continue
        why = f"run {run_id} is {now.state}" if goes_on else _use_later(run_dir, now.state)
        for named in data.names.items():
            runs_of.setdefault(named, {})[run_id] = why
    return runs_of


def _use_later(run_dir: Path, now: str) -> str:
    """Why data stay that a run used which is over; empty when it is finished."""
    if now == "finished" or _has_all_steps(run_dir):
        return ""
    lets_go = f"make prune RUN_ID={run_dir.name} lets it go"
    if whole_checkpoints(run_dir):
        return f"run {run_dir.name} ({now}) can be resumed; {lets_go}"
    return f"run {run_dir.name} ({now}) left it, and the next on the same data goes on with it; {lets_go}"


def _has_all_steps(run_dir: Path) -> bool:
    try:
        steps = durable.read_json(run_dir / state.SPEC_FILE)["recipe"]["train"]["steps"]
    except (OSError, KeyError, TypeError, PayloadError):
        return False
    return whole_checkpoints(run_dir)[-1:] == [steps]


def _items(folder: Path, kind: str) -> Iterator[_Item]:
    """What lies in a folder, by name; what an interrupted job left half made goes with it."""
    by_name: Dict[str, List[Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        # Of answers, each rank that gave them has a file; a partial folder is named .<name>.<random>.
        by_name.setdefault(path.name.lstrip(".").partition(".")[0], []).append(path)
    return (_Item(kind, name, paths) for name, paths in by_name.items())


def _removed(item: _Item, events: Events) -> bool:
    with contextlib.ExitStack() as held:
        if not all(held.enter_context(unused(path)) for path in item.paths):
            events.note(f"{item.kind}/{item.name} is in use: it stays")
            return False
        for path in item.paths:
            events.progress(f"removing {item.kind}/{path.name}")
            durable.remove_wholly(path)
    return True
