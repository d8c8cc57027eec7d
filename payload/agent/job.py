"""Verbs ``start`` and ``stop``: a run's job is started at most once, and stopped wholly."""

from __future__ import annotations

import contextlib
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import List, Mapping, Optional

from payload.agent import durable, state
from payload.agent.environment import base_environment, checked_environment, split_private
from payload.agent.layout import Layout
from payload.agent.locks import RUN_LOCK_FILE, hold
from payload.agent.processes import ProcessId, boot_id, end, is_alive, send_signal
from payload.agent.protocol import Events, Json, Request
from payload.agent.state import ACTIVE, FINAL, RunState
from payload.agent.system import gpu_holders, has_systemd
from payload.errors import PayloadError

_LOCK_WAIT_S = 30.0
_POLL_S = 0.05
_APPEAR_WAIT_S = 15.0
_SYSTEMD_RUN_TIMEOUT_S = 30.0
# What the supervisor gets beyond the grace time before `stop` does its work for it.
_SUPERVISOR_MARGIN_S = 15.0
_GPU_RELEASE_S = 10.0
# A supervisor whose job has been gone for so long only waits until it can write that.
_LOOK_EVERY_S = 0.5
_EMPTY_FOR_S = 2.0


def start(request: Request, events: Events) -> Json:
    """Verb: start the job of a run, detached, at most once.

    The run's folder appears whole, in state ``starting``, before any supervisor is launched. A supervisor runs
    the job only if it turns ``starting`` into ``running`` itself, so launching a second one is harmless: whatever
    is killed between these steps, the job runs once or not at all.

    The run's spec.json is the spec, which anyone may read, with only the harmless values of ``env``; the names of all
    others, and of ``secrets``, are listed in its ``private_env``. Their values are in a file for the job's user alone,
    which goes when the run ends. The job gets all of them.
    """
    layout = Layout.at(request.root)
    run_id = request.need("run_id", str)
    spec = request.need("spec", dict)
    run_dir = layout.run(run_id)
    if spec.get("run_id", run_id) != run_id:
        raise PayloadError(f"the spec is of run {spec['run_id']}, not of {run_id}", kind="usage")
    with hold(layout, "jobs", "start", request.get("holder", str) or "", _LOCK_WAIT_S):
        existed = run_dir.is_dir()
        if not existed:
            _check_spec(layout, spec)
            _check_free(layout)
            _create_run(run_dir, spec)
        found = state.current(layout, run_id)
        if found.state == "starting":
            _launch_supervisor(layout, found, events)
            found = _wait_until_claimed(layout, run_id)
    return {
        "run_id": run_id,
        "state": found.state,
        "started": not existed,
        "reason": found.reason,
        "hint": found.hint,
    }


def _check_spec(layout: Layout, spec: Mapping[str, object]) -> None:
    command, pins = spec.get("command"), {name: spec.get(name) for name in ("release", "venv", "cache")}
    if not isinstance(command, list) or not command or not all(isinstance(part, str) for part in command):
        raise PayloadError("the spec's command is not a list of strings", kind="usage")
    for name, value in pins.items():
        if not isinstance(value, str) and not (name == "cache" and value is None):
            raise PayloadError(f"the spec's {name} is not a name", kind="usage")
    for name in ("env", "secrets"):
        value = spec.get(name) or {}
        if not isinstance(value, dict):
            raise PayloadError(f"the spec's {name} is not an object", kind="usage")
        checked_environment(value)
    release, venv, cache = (str(pins["release"]), str(pins["venv"]), pins["cache"])
    if cache is not None:
        layout.cache(str(cache))
    if not layout.release(release).is_dir():
        raise PayloadError(f"release {release} is not in this container", "Run `deploy`.", kind="refused")
    if not (layout.venv(venv) / "bin" / "python").exists():
        raise PayloadError(f"venv {venv} is not in this container", "Run `venv`.", kind="refused")


def _check_free(layout: Layout) -> None:
    for other in state.active_runs(layout):
        raise PayloadError(
            f"run {other.run_id} is {other.state} in this container",
            f"Follow it with `logs`, or end it with `stop` (run {other.run_id}).",
            kind="busy",
        )
    for lost, left in state.lost_and_alive(layout):
        pids = ", ".join(str(process.pid) for process in left)
        raise PayloadError(
            f"run {lost.run_id} is lost, yet processes of it are still there: {pids}",
            f"End them with `stop` (run {lost.run_id}).",
            kind="busy",
        )


def _create_run(run_dir: Path, spec: Mapping[str, object]) -> None:
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    for leftover in durable.leftovers(run_dir.parent):
        durable.remove(leftover)
    building = run_dir.with_name(f".{run_dir.name}.{secrets.token_hex(4)}")
    building.mkdir()
    try:
        (building / "checkpoints").mkdir()
        shown, private = split_private(checked_environment(spec.get("env") or {}))  # type: ignore[arg-type]
        private.update(checked_environment(spec.get("secrets") or {}))  # type: ignore[arg-type]
        public = {name: value for name, value in spec.items() if name != "secrets"}
        public.update(run_id=run_dir.name, env=shown, private_env=sorted(private))
        durable.write_json(building / state.SPEC_FILE, public)
        if private:
            durable.write_json(building / state.SECRETS_FILE, private, mode=0o600)
        # Made now, so that the run's state can be changed on a full disk too.
        (building / RUN_LOCK_FILE).touch(0o644)
        state.save(building, RunState(run_dir.name, "starting", secrets.token_hex(8), time.time(), boot_id()))
        building.rename(run_dir)
    except BaseException:
        durable.remove(building)
        raise
    durable.sync_folder(run_dir.parent)


def _launch_supervisor(layout: Layout, run: RunState, events: Events) -> None:
    run_dir = layout.run(run.run_id)
    agent = Path(__file__).resolve().parent
    command = [sys.executable, "-I", "-B", str(agent), "supervise", str(layout.root), run.run_id, run.token]
    if has_systemd() and _launch_unit(run.run_id, command, events):
        return
    # A session of its own: the end of the connection reaches neither it nor its children.
    with (run_dir / "supervisor.log").open("ab") as log:
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
        )


def _launch_unit(run_id: str, command: List[str], events: Events) -> bool:
    unit = f"dflash-{run_id}"
    argv = ["systemd-run", f"--unit={unit}", "--collect", "--quiet", "--property=KillMode=control-group"]
    argv += ["--property=OOMPolicy=continue", "--property=TasksMax=infinity"]
    argv += [f"--setenv={name}={value}" for name, value in base_environment().items()]
    argv += ["--", *command, "--unit"]
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_SYSTEMD_RUN_TIMEOUT_S,
            check=False,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    else:
        if done.returncode == 0:
            return True
        problem = done.stderr.strip()
        if _is_there(unit):
            # An agent that was killed had launched it already.
            return True
    events.note(f"systemd does not start the job ({problem}); it is started without systemd")
    return False


def _is_there(unit: str) -> bool:
    """Whether systemd knows the unit and has not done with it."""
    argv = ["systemctl", "is-active", "--quiet", f"{unit}.service"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return (
            subprocess.run(
                argv, stdin=subprocess.DEVNULL, timeout=_SYSTEMD_RUN_TIMEOUT_S, check=False
            ).returncode
            == 0
        )
    return False


def _wait_until_claimed(layout: Layout, run_id: str) -> RunState:
    deadline = time.monotonic() + _APPEAR_WAIT_S
    while True:
        found = state.load(layout.run(run_id))
        ready = found.state != "starting" and (found.job is not None or found.state in FINAL)
        if ready or time.monotonic() >= deadline:
            return found
        time.sleep(_POLL_S)


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
