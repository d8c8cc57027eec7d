"""Verb ``start``: a run's job is started at most once, and lives on without whoever started it."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import List, Mapping

from payload.agent import durable, state
from payload.agent.environment import base_environment, checked_environment, split_private
from payload.agent.layout import Layout
from payload.agent.locks import RUN_LOCK_FILE, hold
from payload.agent.processes import boot_id
from payload.agent.protocol import Events, Json, Request
from payload.agent.state import FINAL, RunState
from payload.agent.system import has_systemd
from payload.errors import PayloadError

_LOCK_WAIT_S = 30.0
_POLL_S = 0.05
_APPEAR_WAIT_S = 15.0
_SYSTEMD_RUN_TIMEOUT_S = 30.0


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
