"""Checks of what a run starts from and beside: its target and rows in the container, and a job that is going on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from orchestrator.checks.model import Finding, Needs, Seen, gib, mapping, mappings, number, text
from payload.agent.layout import OWN


def target(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether the target's folder is there, where the recipe names one."""
    if needs.target is None or "paths" not in seen.facts:
        return
    folder, file = _path(seen, needs.target), _path(seen, needs.target_file)
    if folder.get("kind") != "folder":
        if needs.target_may_be_of_the_hub:
            yield Finding(
                "target", "ok", f"{needs.target}: no folder here, so a name of the Hugging Face hub"
            )
            return
        missing = f"there is no folder {_told(folder, needs.target)}"
    elif file.get("kind") != "file":
        missing = f"{_told(folder, needs.target)} holds no {PurePosixPath(needs.target_file).name}"
    else:
        yield Finding("target", "ok", needs.target)
        return
    yield Finding(
        "target",
        "error",
        missing,
        f"recipe {needs.recipe} takes its target from there",
        _bring(needs, "<the model's folder>", [needs.target], "target.model=<folder>"),
    )


def data(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether the files of rows that the recipe names are there, and hold something."""
    if not needs.rows or "paths" not in seen.facts:
        return
    found = {name: _path(seen, name) for name in needs.rows}
    missing = [name for name, path in found.items() if path.get("kind") != "file"]
    empty = [
        name for name, path in found.items() if path.get("kind") == "file" and not number(path.get("bytes"))
    ]
    if missing or empty:
        what = [f"there is no file {_told(found[name], name)}" for name in missing]
        what += [f"{_told(found[name], name)} is empty" for name in empty]
        yield Finding(
            "data",
            "error",
            "; ".join(what),
            f"recipe {needs.recipe} reads its rows there",
            _bring(needs, "<rows.jsonl>", missing + empty, "data.train=[<file>] data.eval=[<file>]"),
        )
    else:
        size = sum(number(path.get("bytes")) or 0.0 for path in found.values())
        yield Finding("data", "ok", f"{', '.join(found)} ({gib(size)})")


def drafter(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether the folder of the drafter is there that the recipe begins with, where it names one."""
    if needs.drafter is None or "paths" not in seen.facts:
        return
    folder = _path(seen, needs.drafter)
    if folder.get("kind") == "folder":
        yield Finding("drafter", "ok", needs.drafter)
        return
    yield Finding(
        "drafter",
        "error",
        f"there is no folder {_told(folder, needs.drafter)}",
        f"recipe {needs.recipe} begins with the drafter there (train.from_pretrained)",
        _bring(needs, "<the drafter's folder>", [needs.drafter], "train.from_pretrained=runs/<run id>"),
    )


def job(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether a job is going on, and which GPUs it holds: no fault, and a second one has to wait."""
    for run in mappings(seen.facts.get("runs")):
        run_id, state = text(run.get("run_id")), text(run.get("state"))
        held = _held_by(run_id, seen.facts)
        what = "lost its supervisor, and its processes go on" if state == "lost" else f"is {state}"
        yield Finding(
            "job",
            "warning",
            f"run {run_id} {what}" + (f"; it holds {', '.join(held)}" if held else ""),
            "one job at a time: `train` is refused until it is over",
            f"nothing to mend. Follow it: make logs FOLLOW=1 RUN_ID={run_id} {needs.place}   "
            f"End it: make stop RUN_ID={run_id} {needs.place}",
        )


def _held_by(run_id: str, facts: Mapping[str, Any]) -> list[str]:
    """The GPU nodes that processes of a run have open."""
    holders = [who for who in mappings(facts.get("gpu_processes")) if text(who.get("run_id")) == run_id]
    nodes = [node for who in holders if isinstance(who.get("nodes"), list) for node in who["nodes"]]
    return sorted({text(node).removeprefix("/dev/") for node in nodes} - {""})


def _path(seen: Seen, name: str) -> Mapping[str, Any]:
    return mapping(mapping(seen.facts.get("paths")).get(name))


def _told(path: Mapping[str, Any], name: str) -> str:
    return text(path.get("path")) or name


def _bring(needs: Needs, what: str, names: list[str], other: str) -> str:
    """What to type so that each of ``names`` is there; ``other`` names another place in the recipe."""
    fixes = []
    for name in names:
        place = _below_root(needs, name)
        if PurePosixPath(name).parts[:1] == ("runs",):
            fixes.append(f"the runs that are there: make status {needs.place}".rstrip())
            continue
        fixes.append(
            f"make put FILE={what} TO={shlex.quote(place)} {needs.place}".rstrip()
            if place
            else f"bring {name} there (`make put` does not: it is not below {needs.root}, or the tool's own)"
        )
    return "; ".join(fixes) + f"   (or name another: SET='{other}')"


def _below_root(needs: Needs, name: str) -> str:
    """``name`` relative to the root; nothing when it is elsewhere."""
    path = PurePosixPath(name)
    if path.is_absolute():
        path = path.relative_to(needs.root) if path.is_relative_to(needs.root) else PurePosixPath("..")
    out = ".." in path.parts or name.startswith("~") or not path.parts or path.parts[0] in OWN
    return "" if out else str(path)


CHECKS = (target, data, drafter, job)
