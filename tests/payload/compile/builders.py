"""Small things that the tests of this room are made from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from payload.compile.artifact import write_artifact
from payload.compile.cache import CacheDir, Manifest, ProgramRecord, cache_dir, hash_files, write_manifest
from payload.compile.fingerprint import Facts, find_compiler

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="compiles for this CPU: needs g++")

FACTS = Facts(
    torch="2.11.0+cu128",
    cuda="12.8",
    torch_git="70d99e998b",
    triton="3.6.0",
    python="CPython 3.12.3",
    machine="x86_64",
    arch="NVIDIA H200 sm_90",
    compiler="g++ 13",
    sources="0123456789abcdef",
    shapes="fedcba9876543210",
)


def other_facts(**changes: str) -> Facts:
    return replace(FACTS, **changes)


def warm_cache(root: Path, facts: Facts = FACTS) -> CacheDir:
    """A cache as warm-up leaves it, with two kernels that are only bytes."""
    cache = cache_dir(str(root), facts.fingerprint)
    for path, content in (
        (cache.inductor / "fxgraph" / "ab" / "graph", b"graph"),
        (cache.triton / "kernel", b"k"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    record = ProgramRecord("drafter", 60.0, 0, 4, 4, 0, 5.0)
    manifest = Manifest(
        fingerprint=facts.fingerprint,
        facts=facts,
        programs=(record,),
        artifact=write_artifact(cache.artifact, facts, {"drafter": b"blob"}),
        attention="flex_attention",
        seconds=65.0,
        created_at=1.0,
        files=hash_files(cache),
    )
    write_manifest(cache, manifest)
    return cache


def run_folder(root: Path, run_id: str, cache: str | None, state: str = "finished") -> Path:
    """A run's folder as the agent keeps it, as far as caches are concerned."""
    folder = root / "runs" / run_id
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps({"run_id": run_id, "cache": cache}))
    (folder / "state.json").write_text(json.dumps({"state": state}))
    return folder


class Heard:
    """Stands where the protocol's events go, and keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)

    def progress(self, message: str, done: Any = None, total: Any = None) -> None:
        pass
