"""A job is stopped wholly: asked first, ended in time, and no other process touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.payload.agent.container import FakeContainer, is_running, until, wait_until_written
from tests.payload.agent.jobs import APPEND_PID, SLEEP, STUBBORN, pids_in


def test_stop_leaves_no_process_however_stubborn(container: FakeContainer, tmp_path: Path) -> None:
    container.start("r1", STUBBORN, str(tmp_path / "pids"))
    pids = pids_in(tmp_path / "pids", 3)
    supervisor = container.state_file("r1")["supervisor"]["pid"]
    stopped = container.result("stop", run_id="r1", grace_s=0.3)
    assert stopped["state"] == "stopped"
    assert stopped["killed"] == 3
    assert not [pid for pid in pids if is_running(pid)]
    for _ in until(5):
        if not is_running(supervisor):
            break
    assert not is_running(supervisor)
    assert container.result("stop", run_id="r1", grace_s=1)["state"] == "stopped"


def test_stop_lets_a_job_end_in_order_within_the_grace_time(container: FakeContainer, tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.3); print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nopen(sys.argv[1], 'w').write('ready')\ntime.sleep(600)"
    )
    container.start("r1", code, str(tmp_path / "ready"))
    wait_until_written(tmp_path / "ready")
    began = time.monotonic()
    stopped = container.result("stop", run_id="r1", grace_s=20)
    assert time.monotonic() - began < 10
    assert stopped["state"] == "stopped"
    assert (container.root / "runs/r1/output.log").read_text() == "saved\n"


def test_stop_goes_on_when_its_agent_is_killed(container: FakeContainer, tmp_path: Path) -> None:
    container.start("r1", STUBBORN, str(tmp_path / "pids"))
    pids = pids_in(tmp_path / "pids", 3)
    process = container.open("stop", run_id="r1", grace_s=1)
    for _ in until():
        if container.state_file("r1")["state"] == "stopping":
            break
    time.sleep(0.1)
    process.kill()
    process.communicate()
    container.wait_for_state("r1", "stopped")
    assert not [pid for pid in pids if is_running(pid)]


def test_stop_does_the_work_of_a_supervisor_that_is_gone(container: FakeContainer, tmp_path: Path) -> None:
    container.start("r1", STUBBORN, str(tmp_path / "pids"))
    pids = pids_in(tmp_path / "pids", 3)
    os.kill(container.state_file("r1")["supervisor"]["pid"], signal.SIGKILL)
    lost = container.wait_for_state("r1", "lost")
    assert "`stop` ends them" in lost["hint"]
    assert set(lost["left"]) <= set(pids)
    assert len(lost["left"]) >= 2
    busy = container.error("start", run_id="r2", spec=container.spec("pass"))
    assert busy["kind"] == "busy"
    assert container.result("stop", run_id="r1", grace_s=0.2)["state"] == "lost"
    # One of them wiped its environment after its supervisor's death could no longer adopt it: all others are gone.
    marked = [pid for pid in pids if is_running(pid)]
    for pid in marked:
        assert b"DFLASH_RUN_DIR" not in Path(f"/proc/{pid}/environ").read_bytes()
        os.kill(pid, signal.SIGKILL)
    assert len(marked) <= 1


@pytest.mark.slow
def test_stop_does_the_work_of_a_supervisor_that_hangs(container: FakeContainer, tmp_path: Path) -> None:
    container.start("r1", SLEEP, str(tmp_path / "pids"))
    (pid,) = pids_in(tmp_path / "pids", 1)
    supervisor = container.state_file("r1")["supervisor"]["pid"]
    os.kill(supervisor, signal.SIGSTOP)
    stopped = container.result("stop", run_id="r1", grace_s=0)
    assert stopped["state"] == "stopped"
    assert not is_running(pid)
    assert not is_running(supervisor)


def test_what_a_job_leaves_behind_is_ended(container: FakeContainer, tmp_path: Path) -> None:
    # A job that was over before its child had told its pid would have nothing left to find.
    left = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    {APPEND_PID.removeprefix("import os, sys; ")}
    time.sleep(600)
while not (os.path.exists(sys.argv[1]) and os.path.getsize(sys.argv[1])):
    time.sleep(0.01)
"""
    container.start("r1", left, str(tmp_path / "pids"))
    (pid,) = pids_in(tmp_path / "pids", 1)
    assert container.wait_for_state("r1", "finished")
    assert not is_running(pid)


def test_a_recycled_pid_never_gets_a_signal(container: FakeContainer, tmp_path: Path) -> None:
    container.start("r1", SLEEP, str(tmp_path / "pids"))
    pids_in(tmp_path / "pids", 1)
    container.result("stop", run_id="r1", grace_s=0)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        state = container.state_file("r1")
        identity = {**state["supervisor"], "pid": bystander.pid}
        state |= {"state": "running", "ended_at": None, "supervisor": identity, "job": identity}
        (container.root / "runs/r1/state.json").write_text(json.dumps(state))
        assert container.result("stop", run_id="r1", grace_s=0)["state"] == "lost"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_stop_asks_the_job_and_leaves_its_children_to_it(container: FakeContainer) -> None:
    """torchrun ends its ranks in order; a TERM to everything at once shoots the compiler that a rank waits for."""
    child = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('child was shot', flush=True))\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
        "print('child ended in order', flush=True)\n"
    )
    leader = (
        "import signal, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE)\n"
        "def end(*_):\n"
        "    time.sleep(.3); child.stdin.close(); child.wait(); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "time.sleep(60)\n"
    )
    container.start("r1", leader)
    log = container.root / "runs/r1/output.log"
    deadline = time.monotonic() + 20
    while b"ready" not in log.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert container.result("stop", run_id="r1", grace_s=20)["state"] == "stopped"
    assert log.read_text().splitlines() == ["ready", "child ended in order"]
