"""What each verb of the agent answers, as far as the desk reads it, and whether an answer is that.

The container is not trusted: an answer is looked at here, where it comes in, and whoever reads it then may rely on its
shape. Keys that are not named here are let through as they came, for an agent of another version and for ``--json``:
that is why these are dictionaries.
"""

from __future__ import annotations

import base64
import os
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, TypedDict, TypeVar, cast

from orchestrator.container import Container
from orchestrator.errors import RemoteError
from orchestrator.shape import Misfit, check_of
from payload.yaml_binding import require

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What the agent may call a run: one part of a path, and neither ``.`` nor ``..``."""
_LONGEST_NAME = 255
_MOST_FOLDERS = 8
"""In each other; a checkpoint's files need four."""


def _is_below_its_folder(path: str) -> bool:
    """Whether a file's path stays in the folder that it is relative to, and can be a name at the desk."""
    told = PurePosixPath(path)
    try:
        parts = [os.fsencode(part) for part in told.parts]
    except UnicodeEncodeError:
        return False
    return (
        not told.is_absolute()
        and 0 < len(parts) <= _MOST_FOLDERS
        and all(part != b".." and b"\0" not in part and len(part) <= _LONGEST_NAME for part in parts)
    )


def _is_libc(told: list[str]) -> bool:
    return len(told) == 2 and (told[0] != "glibc" or bool(re.fullmatch(r"\d{1,3}\.\d{1,3}.*", told[1])))


# None becomes part of a path at the desk, or of a command to type, before it was looked at here.
RunId = Annotated[str, require(NAME.fullmatch, "is no name of a run")]
Fingerprint = Annotated[str, require(re.compile("[0-9a-f]{16}").fullmatch, "is no name of a compile cache")]
FilePath = Annotated[str, require(_is_below_its_folder, "is no path of a file in the run")]
Sha256 = Annotated[str, require(re.compile("[0-9a-f]{64}").fullmatch, "is no SHA-256")]
Machine = Annotated[str, require(re.compile(r"\w{1,64}", re.ASCII).fullmatch, "is no name of a machine")]
PythonVersion = Annotated[
    str, require(re.compile(r"\d{1,3}\.\d{1,3}\.[0-9a-z+]{1,20}").fullmatch, "is no version of Python")
]
Libc = Annotated[list[str], require(_is_libc, "is no C library with its version")]
Count = Annotated[int, require(lambda count: count >= 0, "is negative")]
Moment = Annotated[float, require(lambda moment: 0 <= moment < 1e11, "is no moment since 1970")]
"""Seconds; up to what calendars can name."""


class _NamedRun(TypedDict):
    run_id: RunId
    state: str


class Run(_NamedRun, total=False):
    recipe: str | None
    steps: int | None
    resumed: RunId | None
    checkpoints: list[int] | None
    started_at: Moment | None
    ended_at: Moment | None
    exit_code: int | None
    reason: str | None
    left: list[int] | None
    last_metrics: dict[str, Any] | None
    """The job wrote them: anything may be among them."""
    log_bytes: Count | None


class NamedCache(TypedDict):
    name: str
    bytes: Count | None


class _Runs(TypedDict):
    runs: list[Run]


class Status(_Runs, total=False):
    release: str | None
    venv: str | None
    caches: list[NamedCache] | None
    gpus: list[dict[str, Any]] | None


class Started(_NamedRun, total=False):
    reason: str | None
    hint: str | None


class Stopped(TypedDict):
    state: str


class LogPiece(TypedDict):
    run_id: RunId
    offset: Count
    data: str


class LogRead(_NamedRun):
    offset: Count


class Output(TypedDict):
    stream: str
    data: str


class ScriptEnd(TypedDict):
    exit_status: int


class ListedFile(TypedDict):
    path: FilePath
    size: Count
    sha256: Sha256


class Files(TypedDict):
    files: list[ListedFile]


class RemovedRun(_NamedRun):
    bytes: Count


class RemovedRuns(TypedDict):
    runs: list[RemovedRun]
    kept: dict[str, str]
    applied: bool


class RemovedItem(TypedDict):
    kind: str
    name: str
    bytes: Count
    runs: list[RunId]


class RemovedData(TypedDict):
    data: list[RemovedItem]
    kept: dict[str, str]
    applied: bool


class Pruned(TypedDict):
    removed: list[str]


class Lock(TypedDict):
    name: str
    holder: str
    verb: str
    pid: int
    age_s: float


class Locks(TypedDict):
    locks: list[Lock]


class Torch(TypedDict, total=False):
    version: str | None
    git: str | None


class _NamedVenv(TypedDict):
    venv: str
    present: bool
    created: bool


class Venv(_NamedVenv, total=False):
    torch: Torch | None


class Python(TypedDict):
    version: PythonVersion


class PlatformFacts(TypedDict):
    """Of the facts, those that decide which wheels fit."""

    machine: Machine
    libc: Libc
    python: Python


class Artifact(TypedDict):
    path: Annotated[str, require(lambda path: NAME.fullmatch(PurePosixPath(path).name), "names no file")]
    bytes: Count
    sha256: Sha256


class _NamedWarmup(TypedDict):
    compiled: bool
    fingerprint: Fingerprint


class Warmup(_NamedWarmup, total=False):
    warm: bool
    reason: str
    seconds: float
    hits: Count
    misses: Count
    source: str
    artifact: Artifact


class Cache(TypedDict):
    fingerprint: Fingerprint
    bytes: Count
    warm: bool
    problem: str | None
    created_at: Moment | None
    pinned_by: list[str]


class Caches(TypedDict):
    caches: list[Cache]


class Verified(TypedDict):
    wrong: list[str]


class PrunedCaches(Pruned):
    bytes: Count


class Estimate(TypedDict):
    role: str
    ranks: list[int]
    phase: str
    phases: dict[str, Count]
    terms: dict[str, Count]
    allocated_bytes: Count
    needed_bytes: Count
    cards: list[int]


class Estimates(TypedDict):
    estimates: list[Estimate]


class Evaluation(TypedDict):
    accepted_length: float
    accepted_by_position: list[float]
    prompts: Count
    tokens: Count
    speedup: float | None
    identical: int | None
    drafter: str
    temperature: float


class NotUnderstood(RemoteError):
    """The container answered something else than what was asked for."""

    def __init__(self, container: Container, asked: str, problem: str) -> None:
        super().__init__(
            f"{container}: its answer to `{asked}` is not understood: {problem}.",
            f"make deploy {container.destination.make_arguments} brings an agent of this version. If that does not "
            "help, whoever runs that container can say why its agent answers so.",
        )


def understood(shape: type[T], answer: object, container: Container, asked: str) -> T:
    """``answer`` itself, which is a ``shape``. Raises :class:`NotUnderstood` that names the first part which is not."""
    try:
        check_of(cast(Any, shape))(answer)
    except Misfit as misfit:
        raise NotUnderstood(container, asked, str(misfit)) from None
    return cast(T, answer)


def decoded(data: str, container: Container, asked: str) -> bytes:
    """The bytes of an event's base64. Raises :class:`NotUnderstood`."""
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise NotUnderstood(container, asked, f"data is no base64 ({error})") from None
