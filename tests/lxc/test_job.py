"""Exactly one job: it starts at most once whatever is killed, needs nobody to live, and leaves nothing when stopped."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.agent import Agent
from orchestrator.errors import OrchestratorError, RefusedError, TransportError
from orchestrator.records import new_run_id
from orchestrator.status import stop
from tests.lxc.bed import PRIVILEGED, Bed
from tests.lxc.conftest import QUIET
from tests.lxc.desk import Desk
from tests.lxc.jobs import start, state_of, until, wait_for
from tests.lxc.lxc import Lxc
from tests.lxc.sshd import descendants
from tests.program_runs import spec

# Notes that it began, and stays.
COUNTED = "import time\nwith open('/opt/starts', 'a') as file:\n    file.write('one\\n')\ntime.sleep(600)"
# A tree that does not want to end: TERM is ignored, children leave the session, parents exit, one wipes its
# environment, and one moves to a control group below the unit's.
STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def child(body):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            body()
            time.sleep(600)
        os._exit(0)
def wiped():
    os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600) # stubborn"], {})
def moved():
    [line] = [line for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    [mount] = [line.split()[1] for line in pathlib.Path("/proc/mounts").read_text().splitlines() if " cgroup2 " in line]
    below = pathlib.Path(mount + line[3:]) / "below"
    below.mkdir()
    (below / "cgroup.procs").write_text(str(os.getpid()))
    wiped()
child(lambda: None)
child(wiped)
child(moved)
print("stubborn", flush=True)
time.sleep(600)
"""
STUBBORN_PROCESSES = 4


@pytest.fixture
def starts(lxc: Lxc) -> Callable[[], int]:
    """How often :data:`COUNTED` began since the test did."""
    lxc.run(["rm", "-f", "/opt/starts"])
    return lambda: len(lxc.run(["sh", "-c", "cat /opt/starts 2>/dev/null || true"]).stdout.splitlines())


def end(agent: Agent, run_id: str, grace_s: float = 0.5) -> dict[str, object]:
    with QUIET.step("stop") as report:
        return stop(agent, run_id, report, grace_s=grace_s)


def kill_pct(lxc: Lxc, words: str) -> None:
    """SIGKILL to each lxc-attach on the machine, which pct became, that runs ``words`` in this container."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            if line.startswith(f"lxc-attach -P {lxc.store} ".encode()) and words.encode() in line:
                os.kill(int(entry.name), signal.SIGKILL)


def ask_to_start(agent: Agent, run_id: str) -> None:
    """Ask once, whatever comes of it."""
    with contextlib.suppress(OrchestratorError):
        agent.call("start", {"run_id": run_id, "spec": spec(run_id, COUNTED)})


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("victim", ["agent", "pct"])
def test_a_run_starts_once_although_its_start_is_killed_at_any_moment_and_asked_for_again(
    agent: Agent, lxc: Lxc, starts: Callable[[], int], victim: str, seed: int
) -> None:
    run_id = new_run_id()
    asking = threading.Thread(target=ask_to_start, args=(agent, run_id))
    asking.start()
    time.sleep(random.Random(seed).uniform(0.02, 0.5))
    if victim == "pct":
        kill_pct(lxc, "payload/agent start")
    else:
        for pid in lxc.pids("payload/agent start"):
            lxc.run(["kill", "-9", str(pid)], check=False)
    asking.join()
    start(agent, COUNTED, run_id)
    assert wait_for(agent, run_id, "running")["pid"]
    until(starts)
    assert start(agent, COUNTED, run_id) == run_id
    assert starts() == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_container_that_restarts_between_the_asking_and_the_answer_runs_the_job_at_most_once(
    agent: Agent, lxc: Lxc, starts: Callable[[], int], seed: int
) -> None:
    run_id = new_run_id()
    asking = threading.Thread(target=ask_to_start, args=(agent, run_id))
    asking.start()
    time.sleep(random.Random(seed).uniform(0.1, 0.7))
    lxc.restart()
    asking.join()
    start(agent, COUNTED, run_id)
    run = state_of(agent, run_id)
    if run["state"] == "failed":
        assert run["reason"] == "its supervisor never appeared, so the job was not started"
        assert starts() == 0
        return
    assert run["state"] in ("starting", "running", "lost"), run
    if run["state"] != "lost":
        wait_for(agent, run_id, "running")
        until(starts)
    assert starts() <= 1


def test_however_often_a_controller_is_killed_while_it_starts_a_job_there_is_one(
    home: Path, inventory: Callable[..., Path], lxc: Lxc, starts: Callable[[], int]
) -> None:
    desk = Desk(home, inventory(root="/opt/killed", env={"STANDIN_JOB": COUNTED}), PRIVILEGED)
    desk.ok("venv")
    moments = random.Random(6)
    for _ in range(4):
        process = desk.open("train", "--cold", "--detach", "--anyway")
        time.sleep(moments.uniform(0.8, 2.5))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    done = desk.run("train", "--cold", "--detach", "--anyway")
    assert done.status in (0, RefusedError.exit_status), done.text
    active = [run["run_id"] for run in desk.status()["runs"] if run["state"] in ("starting", "running")]
    assert len(active) == 1
    until(starts)
    assert starts() == 1
    desk.ok("stop", active[0], "--grace", "1")


def test_a_job_outlives_its_controller_and_the_whole_ssh_server(
    home: Path, inventory: Callable[..., Path], bed: Bed, lxc: Lxc
) -> None:
    job = "import time\nfor number in range(60):\n    print(number, flush=True)\n    time.sleep(0.1)"
    desk = Desk(home, inventory(root="/opt/killed", env={"STANDIN_JOB": job}), PRIVILEGED)
    following = desk.open("train", "--cold", "--anyway")
    assert following.stdout is not None
    following.stdout.readline()
    os.killpg(following.pid, signal.SIGKILL)
    following.communicate()
    bed.sshd.stop()
    bed.sshd.start()
    followed = desk.ok("logs", "--follow")
    assert followed.stdout.split() == [str(number).encode() for number in range(60)]
    assert desk.status()["runs"][0]["state"] == "finished"


def test_stop_leaves_no_process_of_a_tree_that_does_not_want_to_end(agent: Agent, lxc: Lxc) -> None:
    run_id = start(agent, STUBBORN)
    until(lambda: len(lxc.pids("stubborn")) == STUBBORN_PROCESSES)
    assert end(agent, run_id)["state"] == "stopped"
    assert lxc.pids("stubborn") == []


def test_where_no_systemd_runs_a_job_outlives_its_ssh_server_too_and_is_stopped_wholly(
    agent: Agent, bed: Bed, lxc: Lxc
) -> None:
    lxc.run(["mv", "/run/systemd/container", "/run/systemd/no-container"])
    try:
        run_id = start(agent, STUBBORN.replace("child(moved)", ""))
        until(lambda: len(lxc.pids("stubborn")) == STUBBORN_PROCESSES - 1)
        assert "dflash" not in lxc.run(["cat", f"/proc/{state_of(agent, run_id)['pid']}/cgroup"]).stdout
        bed.sshd.stop()
        bed.sshd.start()
        assert state_of(agent, run_id)["state"] == "running"
        assert end(agent, run_id)["state"] == "stopped"
        assert lxc.pids("stubborn") == []
    finally:
        lxc.run(["mv", "/run/systemd/no-container", "/run/systemd/container"])


def test_stop_ends_what_a_killed_supervisor_left_at_once_and_the_run_is_lost(agent: Agent, lxc: Lxc) -> None:
    run_id = start(agent, STUBBORN)
    until(lambda: len(lxc.pids("stubborn")) == STUBBORN_PROCESSES)
    [supervisor] = lxc.pids(f"supervise /opt/dflash {run_id}")
    lxc.run(["kill", "-9", str(supervisor)])
    lost = wait_for(agent, run_id, "lost")
    assert len(lost["left"]) == STUBBORN_PROCESSES
    assert "`stop` ends them" in lost["hint"]
    with pytest.raises(RefusedError, match="processes of it are still there"):
        start(agent, "pass")
    began = time.monotonic()
    end(agent, run_id)
    assert time.monotonic() - began < 10
    assert lxc.pids("stubborn") == []


def test_after_a_restart_of_the_container_a_run_is_lost_and_a_person_is_told_what_to_do(
    agent: Agent, desk: Desk, lxc: Lxc
) -> None:
    run_id = start(agent, "import time; time.sleep(600)")
    wait_for(agent, run_id, "running")
    lxc.restart()
    run = state_of(agent, run_id)
    assert (run["state"], run["reason"]) == ("lost", "the container was restarted while it ran")
    assert run["left"] == []
    assert f"this goes on from it: make train RESUME={run_id}" in desk.ok("status").text
    assert state_of(agent, start(agent, "pass"))["state"] in ("running", "finished")


def test_a_process_that_got_the_pid_of_a_lost_job_is_never_signalled(agent: Agent, lxc: Lxc) -> None:
    # Pids that no process has of itself after the restart.
    lxc.run_as_pid(20_000, ["true"])
    run_id = start(agent, "import time; time.sleep(600)")
    wait_for(agent, run_id, "running")
    found = [*lxc.pids(f"supervise /opt/dflash {run_id}"), state_of(agent, run_id)["pid"]]
    lxc.restart()
    for pid in found:
        # systemd starts processes too while it boots, and may get the number first.
        until(lambda pid=pid: lxc.run_as_pid(pid, ["sleep", "601"]) == pid)
    assert state_of(agent, run_id)["state"] == "lost"
    end(agent, run_id)
    assert all(lxc.is_alive(pid) for pid in found)


def test_a_frozen_container_is_reported_within_the_deadline_and_loses_nothing(agent: Agent, lxc: Lxc) -> None:
    run_id = start(agent, "import time; time.sleep(600)")
    wait_for(agent, run_id, "running")
    lxc.freeze()
    try:
        with pytest.raises(TransportError, match="did not end within 2 s"):
            agent.call("status", {"run_id": run_id}, timeout_s=2)
    finally:
        lxc.unfreeze()
    assert state_of(agent, run_id)["state"] == "running"


def test_the_sessions_of_a_killed_controller_end_on_the_host(bed: Bed, agent: Agent, desk: Desk) -> None:
    run_id = start(agent, "import time; time.sleep(600)")
    before = set(descendants(bed.sshd.pid))
    following = desk.open("logs", "--follow", run_id)
    until(lambda: set(descendants(bed.sshd.pid)) - before)
    os.killpg(following.pid, signal.SIGKILL)
    following.communicate()
    until(lambda: not set(descendants(bed.sshd.pid)) - before)
