"""Warm a compile cache: compile what training will call, prove that it is all there, keep it portable.

``python -m payload.compile.warmup`` answers one request of the agent's protocol. Its fields:

- ``recipe``: the resolved recipe (``Recipe.to_dict()``);
- ``device``: ``cuda`` or ``cpu``; missing takes the GPU when there is one;
- ``artifact``: path of a portable artifact to warm from instead of compiling;
- ``prove``: run the proof again although the cache is warm already;
- ``check``: compile nothing; tell whether the cache is warm.

The result: ``{"compiled", "warm", "reason", "fingerprint", "seconds", "hits", "misses", "programs", "artifact",
"attention", "source"}``; ``source`` tells how the cache came to be warm: ``compiled``, ``artifact`` or ``reused``. For
a cache that ``check`` finds cold: ``{"compiled": true, "warm": false, "reason", "fingerprint"}``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from payload.agent.layout import Layout
from payload.agent.locks import hold
from payload.agent.protocol import Events, Request, serve
from payload.compile.artifact import read_artifact, write_artifact
from payload.compile.cache import (
    CacheDir,
    Manifest,
    ProgramRecord,
    cache_dir,
    hash_files,
    lock_name,
    read_manifest,
    remove_cache,
    verify,
    write_manifest,
)
from payload.compile.fingerprint import Facts, collect_facts
from payload.compile.policy import decide
from payload.compile.worker import Role, WorkReport, WorkRequest
from payload.errors import PayloadError
from payload.recipe import Recipe, recipe_from_dict

PROGRAM_TIMEOUT_S = 1800.0
STDERR_TAIL_LINES = 25


@dataclass(frozen=True)
class Job:
    """One warm-up: what to compile, for which device, into which cache."""

    recipe: dict[str, Any]
    roles: tuple[Role, ...]
    device: str
    facts: Facts
    cache: CacheDir


def distinct_roles(recipe: Recipe) -> tuple[Role, ...]:
    """The roles that occur among the ranks: each is one program, as every rank of a role runs the same shapes."""
    targets, drafters = set(recipe.topology.targets), set(recipe.topology.drafters)
    by_role: dict[Role, set[int]] = {
        "target": targets - drafters,
        "drafter": drafters - targets,
        "both": targets & drafters,
    }
    return tuple(role for role, ranks in by_role.items() if ranks)


def warm_up(request: Request, events: Events) -> dict[str, Any]:
    """Handle one request (see the module). Raises PayloadError when compiling fails or cannot be proved."""
    import torch

    recipe = recipe_from_dict(request.need("recipe", dict))
    device = request.get("device", str) or ("cuda" if torch.cuda.is_available() else "cpu")
    resolved = recipe.to_dict()
    facts = collect_facts(resolved, device)
    decision = decide(recipe.compile, device)
    if not decision.compiled:
        return {"compiled": False, "reason": decision.reason, "fingerprint": facts.fingerprint}
    job = Job(resolved, distinct_roles(recipe), device, facts, cache_dir(request.root, facts.fingerprint))
    layout = Layout.at(request.root)
    with hold(layout, lock_name(facts.fingerprint), "warmup", request.get("holder", str) or ""):
        began = time.monotonic()
        if request.get("check", bool) and not _is_warm(request.root, job, events):
            return {
                "compiled": True,
                "warm": False,
                "reason": decision.reason,
                "fingerprint": facts.fingerprint,
            }
        manifest, source = _warm(request, job, events)
        seconds = time.monotonic() - began
    return {
        "compiled": True,
        "warm": True,
        "reason": decision.reason,
        "fingerprint": facts.fingerprint,
        "seconds": seconds,
        "hits": sum(program.proved_hits for program in manifest.programs),
        "misses": sum(program.proved_misses for program in manifest.programs),
        "programs": [asdict(program) for program in manifest.programs],
        "artifact": asdict(manifest.artifact),
        "attention": manifest.attention,
        "source": source,
    }


def _is_warm(root: str, job: Job, events: Events) -> bool:
    """Whether a sound cache holds a program of every role."""
    known = _sound_manifest(root, job, events)
    return known is not None and set(job.roles) <= {program.role for program in known.programs}


def _warm(request: Request, job: Job, events: Events) -> tuple[Manifest, str]:
    """Reuse, load or compile, in this order; what is damaged or from elsewhere is said and left behind."""
    known = _sound_manifest(request.root, job, events)
    recorded = {program.role for program in known.programs} if known else set()
    missing = tuple(role for role in job.roles if role not in recorded)
    if known is not None and not missing:
        if request.get("prove", bool):
            _require_no_misses(job, _run_all(job, job.roles, "proving", events))
        return known, "reused"
    artifact = request.get("artifact", str)
    if artifact is not None:
        try:
            blobs = read_artifact(Path(artifact), job.facts)
            return _fill(job, missing, known, events, blobs), "artifact"
        except PayloadError as error:
            if error.kind != "refused":
                raise
            events.note(error.message)
    return _fill(job, missing, known, events), "compiled"


def _sound_manifest(root: str, job: Job, events: Events) -> Manifest | None:
    """The manifest of a cache that is whole. Anything else in its place is removed, with a note if it was damaged."""
    try:
        manifest = read_manifest(job.cache)
        wrong = verify(job.cache) if manifest is not None else []
    except PayloadError as error:
        manifest, wrong = None, [error.message]
    if manifest is not None and not wrong:
        return manifest
    if wrong:
        events.note(f"the compile cache {job.cache.fingerprint} is refused and built anew: {wrong[0]}")
    if job.cache.path.exists():
        remove_cache(root, job.cache)
    return None


def _fill(
    job: Job,
    roles: Sequence[Role],
    known: Manifest | None,
    events: Events,
    blobs: Mapping[str, bytes] | None = None,
) -> Manifest:
    """Add programs to the cache, from ``blobs`` (role -> artifact) or by compiling; prove them; write the manifest.

    ``known`` is the manifest of what the cache holds already: it stays, so that a run that uses it is not disturbed.
    Of a new cache nothing is left when it cannot be filled.
    """
    is_new = not job.cache.path.exists()
    for folder in (job.cache.inductor, job.cache.triton):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        return _filled(job, roles, known, events, blobs)
    except BaseException:
        if is_new:
            # Without a manifest it is of use to nobody.
            shutil.rmtree(job.cache.path, ignore_errors=True)
        raise


def _filled(
    job: Job,
    roles: Sequence[Role],
    known: Manifest | None,
    events: Events,
    blobs: Mapping[str, bytes] | None,
) -> Manifest:
    began = time.monotonic()
    saved = read_artifact(job.cache.artifact, job.facts) if known is not None else {}
    if blobs is not None:
        # Each process first writes its blob to the cache: finding everything there is the proof already.
        first = proved = _run_all(job, roles, "loading", events, blobs, saved)
    else:
        first = _run_all(job, roles, "compiling", events)
        compiled = [role for role in roles if first[role].graphs]
        proved = {**first, **_run_all(job, compiled, "proving", events, saved=saved)}
    _require_no_misses(job, proved)
    programs = [_record(first[role], proved[role]) for role in roles]
    manifest = Manifest(
        fingerprint=job.facts.fingerprint,
        facts=job.facts,
        programs=(*(known.programs if known else ()), *programs),
        artifact=write_artifact(job.cache.artifact, job.facts, saved),
        attention=", ".join(sorted({report.attention for report in proved.values()})),
        seconds=time.monotonic() - began,
        created_at=time.time(),
        files=hash_files(job.cache),
    )
    write_manifest(job.cache, manifest)
    return manifest


def _record(first: WorkReport, proved: WorkReport) -> ProgramRecord:
    return ProgramRecord(
        role=first.role,
        seconds=first.seconds,
        hits=first.hits,
        misses=first.misses,
        proved_hits=proved.hits,
        proved_misses=proved.misses,
        proved_seconds=proved.seconds,
    )


def _require_no_misses(job: Job, reports: Mapping[Role, WorkReport]) -> None:
    """Raises PayloadError (kind ``refused``) when a program compiled anything in a second process."""
    for role, report in reports.items():
        if report.misses or report.bypassed:
            raise PayloadError(
                f"the compile cache {job.cache.fingerprint} is not warm: a new process of the {role} missed "
                f"{report.misses} graphs and could not cache {report.bypassed} (it found {report.hits})",
                "Something that decides what is compiled differs from process to process; "
                "TORCH_LOGS=+torch._inductor.codecache shows which part of a key.",
                kind="refused",
            )


def _run_all(
    job: Job,
    roles: Sequence[Role],
    doing: str,
    events: Events,
    blobs: Mapping[str, bytes] | None = None,
    saved: dict[str, bytes] | None = None,
) -> dict[Role, WorkReport]:
    """Run each role's program in a process of its own; with ``saved``, put their artifacts there."""
    reports: dict[Role, WorkReport] = {}
    for done, role in enumerate(roles):
        events.progress(f"{doing} the step of role {role}", done=done, total=len(roles))
        with tempfile.TemporaryDirectory(prefix="warmup-") as folder:
            load, save = Path(folder, "load.bin"), Path(folder, "save.bin")
            if blobs and role in blobs:
                load.write_bytes(blobs[role])
            request = WorkRequest(
                recipe=job.recipe,
                role=role,
                device=job.device,
                load=str(load) if load.exists() else None,
                save=str(save) if saved is not None else None,
            )
            reports[role] = run_worker(request, job.cache.environment(), Path(folder))
            if saved is not None and save.exists():
                saved[role] = save.read_bytes()
    return reports


def run_worker(request: WorkRequest, environment: Mapping[str, str], folder: Path) -> WorkReport:
    """Run one program in a fresh Python. Raises PayloadError with its reason, or with the end of its output."""
    request_path, report_path = folder / "request.json", folder / "report.json"
    request_path.write_text(json.dumps(asdict(request)), encoding="utf-8")
    command = [sys.executable, "-m", "payload.compile.worker", str(request_path), str(report_path)]
    try:
        ended = subprocess.run(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=PROGRAM_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PayloadError(
            f"the step of role {request.role} did not end within {PROGRAM_TIMEOUT_S:.0f} s of warm-up",
            "python -m payload.compile.race tells whether this torch build deadlocks when it compiles.",
        ) from None
    if not report_path.exists():
        lines = ended.stderr.decode("utf-8", "replace").splitlines()
        raise PayloadError(
            f"the process that compiled the step of role {request.role} died with exit status {ended.returncode}",
            "\n".join(lines[-STDERR_TAIL_LINES:]),
        )
    answer = json.loads(report_path.read_text("utf-8"))
    if "error" in answer:
        error = answer["error"]
        raise PayloadError(
            f"the step of role {request.role}: {error['message']}", error["hint"], error["kind"]
        )
    return WorkReport(**answer["report"])


if __name__ == "__main__":
    sys.exit(serve(warm_up))
