"""The process that runs one job: it starts it, sees to its end, and writes what became of it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Dict, List, Optional, Tuple

from payload.agent import durable, state
from payload.agent.environment import venv_environment
from payload.agent.layout import Layout
from payload.agent.processes import (
    ProcessId,
    become_subreaper,
    boot_id,
    cgroup_of_self,
    descendants,
    end,
    identify,
    init_start_time,
)
from payload.agent.state import FINAL, RunState
from payload.errors import PayloadError

_TICK_S = 1.0
# When the stop comes from elsewhere (the container shuts down), nobody has named a grace time.
_DEFAULT_GRACE_S = 10.0
# What the job leaves behind gets this long to end by itself.
_LEFTOVER_GRACE_S = 10.0
_DISK_FULL_PAUSE_S = 2.0


def main(argv: List[str]) -> int:
    """``supervise ROOT RUN_ID TOKEN [--unit]``: run the job of a run that is ``starting`` with this token."""
    root, run_id, token = argv[:3]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    layout = Layout.at(root)
    become_subreaper()
    wakeup = _Wakeup()
    if not _claim(layout, run_id, token, cgroup_of_self() if "--unit" in argv[3:] else None):
        sys.stderr.write(f"run {run_id} is not waiting for this supervisor\n")
        return 1
    try:
        job = _spawn_job(layout, run_id)
    except (OSError, PayloadError) as error:
        _finish(layout, run_id, "failed", None, f"the job cannot be started: {error}", 0, _spawn_hint(error))
        return 1
    identity = identify(job.pid) or ProcessId(job.pid, 0, boot_id())
    _persist(layout, run_id, identity)
    status, killed, stopped = _watch(layout, run_id, job.pid, wakeup)
    job.returncode = status
    killed += _end_leftovers()
    exit_code = status if status >= 0 else 128 - status
    if stopped:
        _finish(layout, run_id, "stopped", exit_code, "stopped", killed)
    else:
        _finish(layout, run_id, "failed" if status else "finished", exit_code, _reason(status), killed)
    return 0


class _Wakeup:
    """Lets the one loop sleep until a child ends, a stop is asked for, or a second has passed."""

    def __init__(self) -> None:
        self.stop_asked = False
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Optional[FrameType]) -> None:
        self.stop_asked = True

    def wait(self) -> None:
        if select.select([self._reader], [], [], _TICK_S)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)


def _claim(layout: Layout, run_id: str, token: str, cgroup: Optional[str]) -> bool:
    """Turn ``starting`` into ``running`` by this supervisor; False when that is not to be had."""
    me = identify(os.getpid())

    def decide(run: RunState) -> Optional[RunState]:
        if run.state != "starting" or run.token != token:
            return None
        return replace(
            run,
            state="running",
            started_at=time.time(),
            supervisor=me,
            cgroup=cgroup,
            boot_id=boot_id(),
            init_start_time=init_start_time(),
        )

    run = state.change(layout, run_id, decide)
    return run.state == "running" and run.supervisor == me


def _spawn_job(layout: Layout, run_id: str) -> subprocess.Popen[bytes]:
    run_dir = layout.run(run_id)
    spec = durable.read_json(run_dir / state.SPEC_FILE)
    environment: Dict[str, str] = venv_environment(layout, spec["venv"], spec["release"], spec["cache"])
    environment.update(spec["env"])
    secrets_file = run_dir / state.SECRETS_FILE
    if secrets_file.exists():
        environment.update(durable.read_json(secrets_file))
    environment[state.RUN_MARK] = str(run_dir)
    environment["DFLASH_RUN_ID"] = run_id
    python = layout.venv(spec["venv"]) / "bin" / "python"
    with (run_dir / state.OUTPUT_FILE).open("ab") as output:
        return subprocess.Popen(
            [str(python), *spec["command"]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=run_dir,
            env=environment,
            start_new_session=True,
        )


def _spawn_hint(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.E2BIG:
        return "A value of the run's environment is too long for the kernel: shorten it in the inventory's `env`."
    return "Check the run's venv and release, and the machine's memory; then start it under a new run id."


def _persist(layout: Layout, run_id: str, job: ProcessId) -> None:
    with contextlib.suppress(OSError, PayloadError):
        # On a full disk the job still runs, and `stop` finds it by its supervisor.
        state.change(layout, run_id, lambda run: replace(run, job=job))


def _watch(layout: Layout, run_id: str, job_pid: int, wakeup: _Wakeup) -> Tuple[int, int, bool]:
    """Wait for the job's end, reaping every orphan.

    Returns (return code as in subprocess, processes ended, whether it was asked to stop before it ended).
    """
    index = _LogIndex(layout.run(run_id))
    killed, stopping = 0, False
    while True:
        ended = _reap()
        index.note()
        if job_pid in ended:
            return ended[job_pid], killed, stopping
        if wakeup.stop_asked and not stopping:
            stopping = True
            killed = len(end(lambda: descendants(os.getpid()), _grace_s(layout, run_id), leader=job_pid).seen)
            continue
        wakeup.wait()


def _reap() -> Dict[int, int]:
    """Collect every child that has ended: pid -> return code."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def _grace_s(layout: Layout, run_id: str) -> float:
    """Write ``stopping`` (unless `stop` has) and return the seconds of patience."""

    def decide(run: RunState) -> Optional[RunState]:
        return replace(run, state="stopping", grace_s=_DEFAULT_GRACE_S) if run.state == "running" else None

    try:
        run = state.change(layout, run_id, decide)
    except (OSError, PayloadError):
        return _DEFAULT_GRACE_S
    return _DEFAULT_GRACE_S if run.grace_s is None else run.grace_s


def _end_leftovers() -> int:
    """End what the job left behind: a rank that outlives torchrun would keep its GPU."""
    count = len(end(lambda: descendants(os.getpid()), _LEFTOVER_GRACE_S).seen)
    _reap()
    return count


def _reason(status: int) -> str:
    if status == 0:
        return ""
    if status > 0:
        return f"the job ended with exit status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    return f"the job was ended by {name}" + (" (out of memory?)" if status == -signal.SIGKILL else "")


def _finish(
    layout: Layout,
    run_id: str,
    final: str,
    exit_code: Optional[int],
    reason: str,
    killed: int,
    hint: str = "",
) -> None:
    def decide(run: RunState) -> Optional[RunState]:
        if run.state in FINAL:
            return None
        return replace(
            run,
            state=final,
            exit_code=exit_code,
            ended_at=time.time(),
            reason=reason,
            hint=hint,
            killed=killed,
        )

    while True:
        try:
            state.change(layout, run_id, decide)
            return
        except (OSError, PayloadError) as error:
            # A full disk must not turn a known end into a lost one: wait until there is room.
            with contextlib.suppress(OSError):
                sys.stderr.write(f"cannot write the final state: {error}\n")
            time.sleep(_DISK_FULL_PAUSE_S)


class _LogIndex:
    """Once a second while the log grows: the time and the log's size, so that ``logs --since`` finds its place."""

    def __init__(self, run_dir: Path) -> None:
        self._log = run_dir / state.OUTPUT_FILE
        self._index = run_dir / state.INDEX_FILE
        self._noted_at = 0.0
        self._offset = -1

    def note(self) -> None:
        now = time.monotonic()
        if now - self._noted_at < _TICK_S:
            return
        with contextlib.suppress(OSError):
            offset = self._log.stat().st_size
            if offset != self._offset:
                with self._index.open("a", encoding="ascii") as file:
                    file.write(json.dumps({"t": round(time.time(), 3), "offset": offset}) + "\n")
                self._noted_at, self._offset = now, offset
