"""The state of a run: one file, changed under the run's lock, whose processes are known by identity."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional, Tuple

from payload.agent import durable
from payload.agent.layout import Layout
from payload.agent.locks import hold_run
from payload.agent.processes import (
    ProcessId,
    boot_id,
    descendants,
    in_cgroup,
    init_start_time,
    is_alive,
    with_environment,
)
from payload.errors import PayloadError

STATE_FILE = "state.json"
SPEC_FILE = "spec.json"
SECRETS_FILE = "secrets.env.json"
OUTPUT_FILE = "output.log"
INDEX_FILE = "output.index"
METRICS_FILE = "metrics.jsonl"
# Every process of a run has this in its environment, so that even one that left the tree is found.
RUN_MARK = "DFLASH_RUN_DIR"

ACTIVE = frozenset({"starting", "running", "stopping"})
FINAL = frozenset({"finished", "failed", "stopped", "lost"})
# How long a supervisor may take to appear before its run is given up.
APPEAR_DEADLINE_S = 30.0
_LOCK_WAIT_S = 30.0
_RESUME_HINT = "`train` resumes from its last checkpoint under a new run id."


@dataclass(frozen=True)
class RunState:
    """What is known of a run. Times are seconds since the epoch, by the container's clock."""

    run_id: str
    state: str
    token: str
    created_at: float
    boot_id: str
    started_at: Optional[float] = None
    ended_at: Optional[float] = None
    exit_code: Optional[int] = None
    supervisor: Optional[ProcessId] = None
    job: Optional[ProcessId] = None
    cgroup: Optional[str] = None
    grace_s: Optional[float] = None
    killed: int = 0
    reason: str = ""
    hint: str = ""
    init_start_time: Optional[int] = None


def load(run_dir: Path) -> RunState:
    """The state in ``run_dir``. Raises PayloadError when there is none or it is damaged."""
    path = run_dir / STATE_FILE
    try:
        content = durable.read_json(path)
    except FileNotFoundError:
        raise PayloadError(
            f"there is no run {run_dir.name}", "`status` lists the runs of this container.", kind="usage"
        ) from None
    try:
        for name in ("supervisor", "job"):
            content[name] = ProcessId(**content[name]) if content[name] else None
        return RunState(**content)
    except (TypeError, KeyError, AttributeError) as error:
        raise PayloadError(f"{path} is damaged: {error}", "Move that run's folder out of the way.") from None


def save(run_dir: Path, state: RunState) -> None:
    """Write ``state`` atomically."""
    durable.write_json(run_dir / STATE_FILE, asdict(state))


def change(layout: Layout, run_id: str, decide: Callable[[RunState], Optional[RunState]]) -> RunState:
    """Change a run's state under its lock: ``decide`` gets the state and returns the new one, or None for none."""
    run_dir = layout.run(run_id)
    # Said in words when there is no such run.
    load(run_dir)
    with hold_run(layout, run_id, _LOCK_WAIT_S):
        state = load(run_dir)
        new = decide(state)
        if new is None:
            return state
        save(run_dir, new)
        if new.state in FINAL:
            (run_dir / SECRETS_FILE).unlink(missing_ok=True)
        return new


def current(layout: Layout, run_id: str) -> RunState:
    """The state of a run, after checking that who should be alive is alive.

    A run whose supervisor never appeared becomes ``failed``; one whose supervisor is gone without a final state
    becomes ``lost``.
    """
    state = load(layout.run(run_id))
    if _judge(state) is None:
        return state
    # Judged again under the lock: the supervisor may have written its last word in between.
    return change(layout, run_id, _judge)


def _judge(state: RunState) -> Optional[RunState]:
    if state.state == "starting":
        waited_s = time.time() - state.created_at
        if state.boot_id == boot_id() and waited_s < APPEAR_DEADLINE_S:
            return None
        return replace(
            state,
            state="failed",
            ended_at=time.time(),
            reason="its supervisor never appeared, so the job was not started",
            hint="Start it again under a new run id.",
        )
    if state.state in FINAL or (state.supervisor is not None and is_alive(state.supervisor)):
        return None
    restarted = state.boot_id != boot_id() or state.init_start_time not in (None, init_start_time())
    return replace(
        state,
        state="lost",
        ended_at=time.time(),
        reason="the container was restarted while it ran"
        if restarted
        else "its supervisor is gone without a word",
        hint=_RESUME_HINT,
    )


def processes(layout: Layout, state: RunState) -> List[ProcessId]:
    """Every live process of the run except its supervisor, wherever it has moved."""
    found = set(with_environment(RUN_MARK, str(layout.run(state.run_id))))
    if state.supervisor is not None and is_alive(state.supervisor):
        found.update(descendants(state.supervisor.pid))
    if state.cgroup is not None:
        found.update(in_cgroup(state.cgroup))
    return [process for process in found if process != state.supervisor]


def left_behind(layout: Layout, state: RunState) -> List[ProcessId]:
    """The live processes of a run that is ``lost``: its job may go on without its supervisor. Else none."""
    return processes(layout, state) if state.state == "lost" else []


def lost_and_alive(layout: Layout) -> Iterator[Tuple[RunState, List[ProcessId]]]:
    """The lost runs that have processes left, each with these."""
    for run_id in run_ids(layout):
        state = current(layout, run_id)
        left = left_behind(layout, state)
        if left:
            yield state, left


def hint(state: RunState, left: List[ProcessId]) -> str:
    """What to do about a run in this state of which ``left`` is what :func:`left_behind` found."""
    if not left:
        return state.hint
    return f"{len(left)} of its processes go on without it. `stop` ends them; then {_RESUME_HINT}"


def run_ids(layout: Layout) -> List[str]:
    """The runs of this container, oldest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for run_dir in layout.runs.iterdir():
            if not run_dir.name.startswith(".") and (run_dir / STATE_FILE).is_file():
                found.append(run_dir)
    return [run_dir.name for run_dir in sorted(found, key=_age_key)]


def _age_key(run_dir: Path) -> Any:
    try:
        return load(run_dir).created_at, run_dir.name
    except PayloadError:
        return 0.0, run_dir.name


def active_runs(layout: Layout) -> Iterator[RunState]:
    """The runs that are starting, running or stopping."""
    for run_id in run_ids(layout):
        state = current(layout, run_id)
        if state.state in ACTIVE:
            yield state


def resolve(layout: Layout, run_id: Optional[str]) -> str:
    """``run_id`` when it is a run here, or the newest run when it is None. Raises PayloadError."""
    if run_id is not None:
        load(layout.run(run_id))
        return run_id
    known = run_ids(layout)
    if not known:
        raise PayloadError("no run was ever started in this container", "Start one with `train`.")
    return known[-1]
