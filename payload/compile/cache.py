"""Compile caches on disk: ``<root>/cache/<fingerprint>/{inductor,triton,artifact.bin,manifest.json}``.

A cache is warm when its manifest says so: the manifest is written last, after a second process has run every
program without a single miss. A directory without one is unfinished or was filled by a run that started cold.
No torch is imported here: listing and pruning work in any venv, and before there is one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from payload.agent.checksum import file_sha256
from payload.agent.durable import read_json, write_json
from payload.agent.layout import Layout
from payload.agent.locks import hold
from payload.compile.fingerprint import Facts
from payload.errors import PayloadError

MANIFEST_VERSION = 1
LIVE_STATES = frozenset({"starting", "running", "stopping"})

# Rewritten by later runs without harm: locks, and autotuning results that coordinate descent refines.
MUTABLE_SUFFIXES = (".lock", ".best_config")


@dataclass(frozen=True)
class ProgramRecord:
    """One compiled program: what compiling it cost, and what the proving process found."""

    role: str
    seconds: float
    hits: int
    misses: int
    proved_hits: int
    proved_misses: int
    proved_seconds: float


@dataclass(frozen=True)
class Artifact:
    """The portable form of the cache (``torch.compiler.save_cache_artifacts``)."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a warm cache holds, for whom, and how it came to be."""

    fingerprint: str
    facts: Facts
    programs: tuple[ProgramRecord, ...]
    artifact: Artifact
    attention: str
    seconds: float
    created_at: float
    files: Mapping[str, str] = field(default_factory=dict)
    version: int = MANIFEST_VERSION


@dataclass(frozen=True)
class CacheDir:
    """One cache's directory; made by :func:`cache_dir`."""

    path: Path

    @property
    def fingerprint(self) -> str:
        return self.path.name

    @property
    def inductor(self) -> Path:
        return self.path / "inductor"

    @property
    def triton(self) -> Path:
        return self.path / "triton"

    @property
    def artifact(self) -> Path:
        return self.path / "artifact.bin"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    def environment(self) -> dict[str, str]:
        """The variables through which torch and Triton find this cache."""
        return {"TORCHINDUCTOR_CACHE_DIR": str(self.inductor), "TRITON_CACHE_DIR": str(self.triton)}

    def size_bytes(self) -> int:
        """Bytes of all files; files that vanish meanwhile count nothing."""
        return sum(_size(file) for file in _files(self.path))


def cache_dir(root: str, fingerprint: str) -> CacheDir:
    """The directory of one cache under ``root`` (not made)."""
    return CacheDir(Layout.at(root).cache(fingerprint))


def cache_dirs(root: str) -> list[CacheDir]:
    """All caches under ``root``, sorted by name."""
    folder = Layout.at(root).caches
    if not folder.is_dir():
        return []
    return [
        CacheDir(path) for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")
    ]


def parse_manifest(path: Path) -> Manifest:
    """Read one manifest. Raises PayloadError (kind ``refused``) when it is damaged or of another version."""
    value = read_json(path)
    try:
        if value["version"] != MANIFEST_VERSION:
            raise PayloadError(
                f"{path} has version {value['version']}, this release reads version {MANIFEST_VERSION}",
                "Run warmup again: it builds the cache anew.",
                kind="refused",
            )
        value["facts"] = Facts(**value["facts"])
        value["artifact"] = Artifact(**value["artifact"])
        value["programs"] = tuple(ProgramRecord(**program) for program in value["programs"])
        manifest = Manifest(**value)
    except (KeyError, TypeError) as error:
        raise PayloadError(
            f"{path} is not a manifest of a compile cache: {error}",
            "Run warmup again: it builds the cache anew.",
            kind="refused",
        ) from None
    if manifest.facts.fingerprint != manifest.fingerprint:
        raise PayloadError(
            f"{path} says {manifest.fingerprint}, but its facts make {manifest.facts.fingerprint}",
            "It was changed after it was written. Run warmup again: it builds the cache anew.",
            kind="refused",
        )
    return manifest


def read_manifest(cache: CacheDir) -> Manifest | None:
    """The cache's manifest, or None when it has none (not warm). Raises PayloadError when it is damaged."""
    if not cache.manifest.exists():
        return None
    manifest = parse_manifest(cache.manifest)
    if manifest.fingerprint != cache.fingerprint:
        raise PayloadError(
            f"{cache.path} holds the cache {manifest.fingerprint}: it was copied or renamed",
            "Run warmup again: it builds the cache anew.",
            kind="refused",
        )
    return manifest


def write_manifest(cache: CacheDir, manifest: Manifest) -> None:
    """Make the cache warm: the last step of warming."""
    write_json(cache.manifest, asdict(manifest))


def hash_files(cache: CacheDir) -> dict[str, str]:
    """sha256 by path (relative to the cache) of every file that no later run rewrites."""
    hashes = {}
    for folder in (cache.inductor, cache.triton):
        for file in _files(folder):
            relative = file.relative_to(cache.path)
            if file.name.endswith(MUTABLE_SUFFIXES) or "locks" in relative.parts:
                continue
            hashes[relative.as_posix()] = file_sha256(file)
    return hashes


def verify(cache: CacheDir) -> list[str]:
    """What is wrong with a warm cache, a line each; empty when all is well.

    The artifact and every file listed in the manifest must be there with the hash written down. Files that
    came later (another run's autotuning) are no fault. Raises PayloadError when there is no readable manifest.
    """
    manifest = read_manifest(cache)
    if manifest is None:
        raise PayloadError(
            f"{cache.path} has no manifest: it was never warmed to the end", "Run warmup.", kind="refused"
        )
    wrong = [
        problem
        for name, digest in sorted(manifest.files.items())
        if (problem := _compare(cache.path / name, digest)) is not None
    ]
    problem = _compare(cache.artifact, manifest.artifact.sha256)
    return wrong if problem is None else [problem, *wrong]


def describe(root: str, cache: CacheDir) -> dict[str, Any]:
    """One cache for a listing: name, size, whether it is warm, who pins it, and its facts when it has a manifest."""
    try:
        manifest, problem = read_manifest(cache), ""
    except PayloadError as error:
        manifest, problem = None, error.message
    return {
        "fingerprint": cache.fingerprint,
        "bytes": cache.size_bytes(),
        "warm": manifest is not None,
        "problem": problem,
        "pinned_by": pinned_caches(root).get(cache.fingerprint, []),
        "created_at": manifest.created_at if manifest else None,
        "attention": manifest.attention if manifest else None,
        "programs": [asdict(program) for program in manifest.programs] if manifest else [],
        "artifact": asdict(manifest.artifact) if manifest else None,
        "facts": asdict(manifest.facts) if manifest else None,
    }


def pinned_caches(root: str) -> dict[str, list[str]]:
    """fingerprint -> the runs whose spec.json pins it, ended ones too: a run can be resumed.

    Raises PayloadError when a run's spec cannot be read: what it pins is unknown then.
    """
    pins: dict[str, list[str]] = {}
    for run in _runs(root):
        spec = read_json(run / "spec.json") if (run / "spec.json").exists() else {}
        if isinstance(spec, dict) and spec.get("cache"):
            pins.setdefault(str(spec["cache"]), []).append(run.name)
    return pins


def live_users(root: str, fingerprint: str) -> list[str]:
    """The runs that pin the cache and are starting, running or stopping."""
    users = []
    for name in pinned_caches(root).get(fingerprint, []):
        path = Layout.at(root).run(name) / "state.json"
        state = read_json(path) if path.exists() else {"state": "starting"}
        if isinstance(state, dict) and state.get("state") in LIVE_STATES:
            users.append(name)
    return users


def remove_cache(root: str, cache: CacheDir) -> None:
    """Delete a cache that is to be built anew. Refused (kind ``busy``) while a live run uses it."""
    users = live_users(root, cache.fingerprint)
    if users:
        raise PayloadError(
            f"the compile cache {cache.fingerprint} is in use by {', '.join(users)}",
            "Wait until the run is over, or stop it, then run warmup again.",
            kind="busy",
        )
    _delete(cache.path)


def prune(root: str, apply: bool, holder: str = "") -> dict[str, Any]:
    """Remove (with ``apply``; else only tell) the caches that no run pins and no warm-up is filling.

    Returns {"removed": [...], "kept": {fingerprint: [why, ...]}, "bytes": freed or to be freed, "applied"}.
    """
    pins = pinned_caches(root)
    removed, freed = [], 0
    kept = {fingerprint: [f"pinned by {run}" for run in runs] for fingerprint, runs in pins.items()}
    for cache in cache_dirs(root):
        if cache.fingerprint in pins:
            continue
        try:
            with hold(Layout.at(root), lock_name(cache.fingerprint), "cache prune", holder):
                size_bytes = cache.size_bytes()
                if apply:
                    _delete(cache.path)
        except PayloadError as error:
            if error.kind != "busy":
                raise
            kept[cache.fingerprint] = [error.message]
            continue
        removed.append(cache.fingerprint)
        freed += size_bytes
    return {"removed": removed, "kept": kept, "bytes": freed, "applied": apply}


def lock_name(fingerprint: str) -> str:
    """The lock that whoever fills or removes this cache holds."""
    return f"cache-{fingerprint}"


def _runs(root: str) -> Iterator[Path]:
    folder = Layout.at(root).runs
    if folder.is_dir():
        yield from (path for path in sorted(folder.iterdir()) if path.is_dir())


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent) / name for name in names if not (Path(parent) / name).is_symlink())


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _compare(path: Path, digest: str) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing ({path})"
    return None if file_sha256(path) == digest else f"{path.name} is damaged ({path})"


def _delete(path: Path) -> None:
    # Renamed first: whoever lists the caches meanwhile never sees half of one.
    doomed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)
