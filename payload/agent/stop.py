"""Verb ``stop``: a run's job is ended wholly, with all that it started and all that it holds."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import List, Optional

from payload.agent import state
from payload.agent.layout import Layout
from payload.agent.processes import ProcessId, end, is_alive, send_signal
from payload.agent.protocol import Events, Json, Request
from payload.agent.state import ACTIVE, FINAL, RunState
from payload.agent.system import gpu_holders
from payload.errors import PayloadError

_POLL_S = 0.05
# What the supervisor gets beyond the grace time before `stop` does its work for it.
_SUPERVISOR_MARGIN_S = 15.0
_GPU_RELEASE_S = 10.0
# A supervisor whose job has been gone for so long only waits until it can write that.
_LOOK_EVERY_S = 0.5
_EMPTY_FOR_S = 2.0


def stop(request: Request, events: Events) -> Json:
    """Verb: end every process of a run: TERM, ``grace_s`` seconds of patience, KILL.

    The supervisor does it, so that it goes on when this agent is killed; if the supervisor hangs or is gone,
    the agent does it itself. ``killed`` counts the processes that were ended. On a full disk the run stays in its
    state, without a process of the job, until there is room. Raises PayloadError when a process or its hold on a GPU
    is still there afterwards.
    """
    layout = Layout.at(request.root)
    run_id = state.resolve(layout, request.get("run_id", str))
    grace_s = request.get("grace_s", float)
    grace_s = 30.0 if grace_s is None else max(0.0, grace_s)
    pids = {process.pid for process in state.processes(layout, state.load(layout.run(run_id)))}
    try:
        state.change(layout, run_id, lambda run: _ask_to_stop(run, grace_s))
    except OSError as error:
        # A job on a full disk can be stopped too.
        events.note(
            f"the state of run {run_id} cannot be written ({error.strerror}); it is stopped all the same"
        )
    found = state.current(layout, run_id)
    killed = 0
    if found.state in ACTIVE:
        events.progress(f"stopping run {run_id}: up to {grace_s:.0f} s for an orderly end")
        if found.supervisor is not None:
            found = _wait_for_supervisor(layout, found, grace_s)
        killed = found.killed
    left = state.processes(layout, found)
    refusal = _refusal_to_write(layout, run_id) if found.state in ACTIVE and not left else None
    if refusal is not None:
        # Its supervisor lives on to write what became of it.
        events.note(
            f"the processes of run {run_id} are gone; its end is written as soon as that can be ({refusal.strerror})"
        )
    elif left or found.state in ACTIVE:
        killed += _end_ourselves(layout, found, grace_s if found.state in FINAL else 0.0)
        found = state.current(layout, run_id)
    _check_gpus_released(pids, run_id)
    return {"run_id": run_id, "state": found.state, "killed": killed}


def _ask_to_stop(run: RunState, grace_s: float) -> Optional[RunState]:
    if run.state == "starting":
        # No supervisor has claimed it; now none can.
        return replace(run, state="stopped", ended_at=time.time(), reason="stopped before it began")
    if run.state in ("running", "stopping"):
        return replace(run, state="stopping", grace_s=grace_s)
    return None


def _wait_for_supervisor(layout: Layout, run: RunState, grace_s: float) -> RunState:
    supervisor = run.supervisor
    if supervisor is None:
        return run
    send_signal(supervisor, signal.SIGTERM)
    deadline = time.monotonic() + grace_s + _SUPERVISOR_MARGIN_S
    looked_at = empty_since = time.monotonic()
    while True:
        found = state.load(layout.run(run.run_id))
        now = time.monotonic()
        if found.state in FINAL or not is_alive(supervisor) or now >= deadline:
            return found
        if now - looked_at >= _LOOK_EVERY_S:
            looked_at = now
            if state.processes(layout, found):
                empty_since = now
            elif now - empty_since >= _EMPTY_FOR_S:
                return found
        time.sleep(_POLL_S)


def _refusal_to_write(layout: Layout, run_id: str) -> Optional[OSError]:
    """Why the state of a run cannot be written, or None when it can."""
    try:
        state.change(layout, run_id, lambda run: run)
    except OSError as error:
        return error
    return None


def _end_ourselves(layout: Layout, run: RunState, grace_s: float) -> int:
    def everything() -> List[ProcessId]:
        own = [run.supervisor] if run.supervisor is not None and is_alive(run.supervisor) else []
        return state.processes(layout, run) + own

    ended = end(everything, grace_s)
    if ended.left:
        pids = ", ".join(str(process.pid) for process in ended.left)
        raise PayloadError(
            f"processes of run {run.run_id} do not end even by KILL: {pids}",
            "They wait in the kernel, usually for the GPU driver; if they stay, restart the container.",
        )

    def stopped(now: RunState) -> Optional[RunState]:
        if now.state in FINAL:
            return None
        return replace(now, state="stopped", ended_at=time.time(), reason="stopped", killed=len(ended.seen))

    state.change(layout, run.run_id, stopped)
    return len(ended.seen)


def _check_gpus_released(pids: set[int], run_id: str) -> None:
    deadline = time.monotonic() + _GPU_RELEASE_S
    while held := pids & gpu_holders():
        if time.monotonic() >= deadline:
            raise PayloadError(
                f"GPU memory of run {run_id} is not released (pids {', '.join(map(str, sorted(held)))})",
                "Look at nvidia-smi; if it stays, restart the container.",
            )
        time.sleep(_POLL_S)
