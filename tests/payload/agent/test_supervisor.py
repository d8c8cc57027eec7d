"""The supervisor runs the job of the run it was launched for, and tells what became of it as it was."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.payload.agent.container import FakeContainer, is_running, until, wait_until_written

# What outlives the job takes a while to end, as a rank does that saves something.
LEAVES_A_CHILD = """
import os, signal, sys, time
if os.fork() == 0:
    def end(*_):
        time.sleep(2)
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
    open(sys.argv[1], "w").write(str(os.getppid()))
    time.sleep(600)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(("status", "state"), [(0, "finished"), (3, "failed")])
def test_a_stop_that_comes_after_the_jobs_own_end_does_not_change_what_became_of_it(
    container: FakeContainer, tmp_path: Path, status: int, state: str
) -> None:
    container.start("r1", LEAVES_A_CHILD, str(tmp_path / "pid"), str(status))
    job = int(wait_until_written(tmp_path / "pid"))
    for _ in until():
        if not is_running(job):
            break
    time.sleep(0.2)
    assert container.state_file("r1")["state"] == "running"
    assert container.result("stop", run_id="r1", grace_s=10)["state"] == state
    ended = container.state("r1")
    assert (ended["state"], ended["exit_code"]) == (state, status)
    assert ("exit status 3" in ended["reason"]) == (state == "failed")


def test_a_supervisor_that_was_launched_for_another_run_of_the_same_id_starts_nothing(
    container: FakeContainer, tmp_path: Path
) -> None:
    container.start("r1", f"open({str(tmp_path / 'ran')!r}, 'a').write('once ')")
    container.wait_for_state("r1", "finished")
    starting = container.state_file("r1") | {
        "state": "starting",
        "created_at": time.time(),
        "supervisor": None,
        "job": None,
    }
    (container.root / "runs/r1/state.json").write_text(json.dumps(starting))

    def supervise(token: str) -> int:
        argv = [sys.executable, "-I", str(container.agent), "supervise", str(container.root), "r1", token]
        return subprocess.run(argv, capture_output=True, timeout=30).returncode

    assert supervise("another") == 1
    assert container.state_file("r1")["state"] == "starting"
    assert (tmp_path / "ran").read_text() == "once "
    assert supervise(starting["token"]) == 0
    assert (tmp_path / "ran").read_text() == "once once "
