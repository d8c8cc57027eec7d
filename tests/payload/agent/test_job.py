"""A job is started at most once, survives whoever started it, and is stopped wholly."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from payload.agent.layout import Layout
from payload.errors import PayloadError
from tests.payload.agent.container import FakeContainer, is_running, until, wait_until_written

APPEND_PID = "import os, sys; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n')"
SLEEP = APPEND_PID + "\nimport time; time.sleep(600)"
# A tree that does not want to end: TERM is ignored, children leave the session, their parents exit, one wipes its
# environment.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def note():
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        note()
        time.sleep(600)
    os._exit(0)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        note()
        os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], {})
    os._exit(0)
note()
time.sleep(600)
"""


def pids_in(path: Path, count: int) -> list[int]:
    for _ in until():
        if path.exists() and len(path.read_text().split()) >= count:
            return [int(pid) for pid in path.read_text().split()]
    raise AssertionError(f"{path} does not hold {count} pids")


def test_a_job_runs_to_its_end_and_its_exit_status_is_kept(container: FakeContainer) -> None:
    started = container.start("r1", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert started["started"]
    ended = container.wait_for_state("r1", "failed")
    assert ended["exit_code"] == 3
    assert "exit status 3" in ended["reason"]
    assert sorted((container.root / "runs/r1/output.log").read_text().split()) == ["err", "out"]


def test_a_job_that_succeeds_is_finished(container: FakeContainer) -> None:
    container.start("r1", "")
    ended = container.wait_for_state("r1", "finished")
    assert ended["exit_code"] == 0
    assert ended["left"] == []


def test_a_job_that_a_signal_ends_has_failed_and_the_signal_is_named(container: FakeContainer) -> None:
    container.start("r1", "import os; os.kill(os.getpid(), 9)")
    ended = container.wait_for_state("r1", "failed")
    assert ended["exit_code"] == 137
    assert "SIGKILL" in ended["reason"]


def test_a_job_gets_an_explicit_environment_and_no_stdin(container: FakeContainer) -> None:
    code = "import json, os, sys; print(json.dumps([dict(os.environ), os.getcwd(), sys.stdin.read()]))"
    container.environment = {**container.environment, "LEAKED": "yes"}
    container.start("r1", code, cache="some-fingerprint", env={"GIVEN": "it's $HOME"})
    container.wait_for_state("r1", "finished")
    environment, folder, stdin = json.loads((container.root / "runs/r1/output.log").read_text())
    assert "LEAKED" not in environment
    assert environment["GIVEN"] == "it's $HOME"
    assert environment["PYTHONPATH"] == str(container.root / "releases" / container.release)
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(container.root / "cache/some-fingerprint/inductor")
    assert environment["TRITON_CACHE_DIR"] == str(container.root / "cache/some-fingerprint/triton")
    assert folder == str(container.root / "runs/r1")
    assert stdin == ""


def test_the_same_run_id_again_starts_nothing(container: FakeContainer, tmp_path: Path) -> None:
    container.start("r1", SLEEP, str(tmp_path / "pids"))
    pids_in(tmp_path / "pids", 1)
    again = container.start("r1", SLEEP, str(tmp_path / "pids"))
    assert again["state"] == "running"
    assert not again["started"]
    container.result("stop", run_id="r1", grace_s=0)
    assert container.start("r1", SLEEP, str(tmp_path / "pids"))["state"] == "stopped"
    assert len(pids_in(tmp_path / "pids", 1)) == 1


def test_many_starts_at_once_of_one_run_start_one_job(container: FakeContainer, tmp_path: Path) -> None:
    spec = container.spec(SLEEP, str(tmp_path / "pids"))
    asked = [container.open("start", run_id="r1", spec=spec) for _ in range(6)]
    answers = [process.communicate(timeout=60)[0] for process in asked]
    assert sum(b'"started": true' in answer for answer in answers) == 1
    assert all(b'"state": "running"' in answer for answer in answers)
    time.sleep(0.3)
    assert len(pids_in(tmp_path / "pids", 1)) == 1


def test_a_second_run_is_refused_by_the_name_of_the_first(container: FakeContainer, tmp_path: Path) -> None:
    container.start("r1", SLEEP, str(tmp_path / "pids"))
    error = container.error("start", run_id="r2", spec=container.spec("pass"))
    assert error["kind"] == "busy"
    assert "r1" in error["message"]
    assert not (container.root / "runs/r2").exists()


def test_two_runs_at_once_start_one_job(container: FakeContainer, tmp_path: Path) -> None:
    spec = container.spec(SLEEP, str(tmp_path / "pids"))
    asked = [container.open("start", run_id=f"r{number}", spec=spec) for number in range(4)]
    answers = [process.communicate(timeout=60)[0] for process in asked]
    assert sum(b'"started": true' in answer for answer in answers) == 1
    assert sum(b'"busy"' in answer for answer in answers) == 3
    assert len(pids_in(tmp_path / "pids", 1)) == 1


@pytest.mark.parametrize("delay_ms", [40, 70, 90, 120])
def test_an_agent_that_is_killed_while_starting_starts_the_job_once_or_not_at_all(
    container: FakeContainer, tmp_path: Path, delay_ms: int
) -> None:
    pids = tmp_path / "pids"
    process = container.open("start", run_id="r1", spec=container.spec(SLEEP, str(pids)))
    time.sleep(delay_ms / 1000)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    again = container.start("r1", SLEEP, str(pids))
    assert again["state"] == "running"
    time.sleep(0.2)
    assert len(pids_in(pids, 1)) == 1


def test_a_supervisor_that_comes_too_late_starts_nothing(container: FakeContainer, tmp_path: Path) -> None:
    container.start("r1", "")
    container.wait_for_state("r1", "finished")
    state = container.state_file("r1")
    state |= {"state": "starting", "created_at": time.time() - 60, "supervisor": None, "job": None}
    (container.root / "runs/r1/state.json").write_text(json.dumps(state))
    given_up = container.state("r1")
    assert given_up["state"] == "failed"
    assert "never appeared" in given_up["reason"]
    late = [
        sys.executable,
        "-I",
        str(container.agent),
        "supervise",
        str(container.root),
        "r1",
        state["token"],
    ]
    assert subprocess.run(late, capture_output=True, timeout=30).returncode == 1
    assert container.state("r1")["state"] == "failed"


def test_a_job_outlives_the_session_that_started_it(container: FakeContainer, tmp_path: Path) -> None:
    process = container.open("start", run_id="r1", spec=container.spec(SLEEP, str(tmp_path / "pids")))
    process.communicate(timeout=30)
    for number in (signal.SIGHUP, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
    (pid,) = pids_in(tmp_path / "pids", 1)
    assert is_running(pid)
    supervisor = container.state_file("r1")["supervisor"]["pid"]
    os.kill(supervisor, signal.SIGHUP)
    time.sleep(0.2)
    assert container.state("r1")["state"] == "running"


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
    left = f"import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n    {APPEND_PID[16:]}\n    time.sleep(600)"
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


def test_a_run_from_before_a_restart_of_the_container_alone_is_lost_and_the_restart_is_named(
    container: FakeContainer,
) -> None:
    container.start("r1", "")
    container.wait_for_state("r1", "finished")
    path = container.root / "runs/r1/state.json"
    # A container may have its host's boot id, but it has a process 1 of its own.
    state = {**json.loads(path.read_text()), "state": "running", "init_start_time": -1}
    path.write_text(json.dumps(state))
    assert container.state("r1")["reason"] == "the container was restarted while it ran"


def test_a_run_of_an_earlier_boot_is_lost(container: FakeContainer) -> None:
    container.start("r1", "")
    container.wait_for_state("r1", "finished")
    state = container.state_file("r1")
    old = {"pid": os.getpid(), "start_time": 1, "boot_id": "another"}
    state |= {"state": "running", "boot_id": "another", "supervisor": old, "job": old}
    (container.root / "runs/r1/state.json").write_text(json.dumps(state))
    lost = container.state("r1")
    assert lost["state"] == "lost"
    assert "restarted" in lost["reason"]
    assert lost["left"] == []
    assert "stop" not in lost["hint"]


def test_secrets_are_in_one_private_file_and_nowhere_else(container: FakeContainer, tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "open(sys.argv[1], 'w').write(os.environ['HF_TOKEN'] + os.environ['OTHER'])\ntime.sleep(600)"
    )
    container.start(
        "r1",
        code,
        str(tmp_path / "seen"),
        env={"HF_TOKEN": "hf-5ecret", "TOKENIZERS_PARALLELISM": "false"},
        secrets={"OTHER": "al5o"},
    )
    assert wait_until_written(tmp_path / "seen") == "hf-5ecretal5o"
    run_dir = container.root / "runs/r1"
    holders = [path for path in run_dir.rglob("*") if path.is_file() and b"5ecret" in path.read_bytes()]
    assert holders == [run_dir / "secrets.env.json"]
    assert stat.S_IMODE(holders[0].stat().st_mode) == 0o600
    assert "false" in (run_dir / "spec.json").read_text()
    pids = [container.state_file("r1")[name]["pid"] for name in ("supervisor", "job")]
    assert not [pid for pid in pids if b"5ecret" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    container.result("stop", run_id="r1", grace_s=0)
    assert not holders[0].exists()


def test_a_value_of_the_environment_is_private_unless_it_is_known_to_be_harmless(
    container: FakeContainer,
) -> None:
    shown = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "HF_HOME": "/data/hf",
    }
    private = {
        "DATABASE_URL": "postgres://ann:5ecret@db/x",
        "AWS_SESSION": "5ecret",
        "OPENAI_KEY": "5ecret",
        "NCCL_AUTH_TOKEN": "5ecret",
        "TORCH_HUB_MIRROR": "https://ann:5ecret@mirror.test/",
        "omp_num_threads": "5ecret",
    }
    code = "import json, os; json.dump(dict(os.environ), open('checkpoints/seen', 'w'))"
    container.start("r1", code, env={**shown, **private}, secrets={"OTHER": "5ecret"})
    container.wait_for_state("r1", "finished")
    run_dir = container.root / "runs/r1"
    seen = json.loads((run_dir / "checkpoints/seen").read_text())
    assert {**shown, **private, "OTHER": "5ecret"}.items() <= seen.items()
    text = (run_dir / "spec.json").read_text()
    assert "5ecret" not in text
    spec = json.loads(text)
    assert spec["env"] == shown
    assert spec["private_env"] == sorted([*private, "OTHER"])
    assert not (run_dir / "secrets.env.json").exists()


def test_a_job_that_cannot_be_spawned_has_failed_and_the_start_says_why_and_what_to_do(
    container: FakeContainer,
) -> None:
    started = container.start("r1", "", env={"LONG": "x" * 140_000})
    assert started["state"] == "failed"
    assert "Argument list too long" in started["reason"]
    assert "too long" in started["hint"]
    assert container.state("r1")["hint"] == started["hint"]
    assert container.start("r2", "")["started"]


def test_nothing_is_writable_for_others(container: FakeContainer) -> None:
    container.start("r1", "open('metrics.jsonl', 'w')")
    container.wait_for_state("r1", "finished")
    made = [*(container.root / "runs").rglob("*"), *(container.root / "locks").rglob("*")]
    assert made
    assert not [path for path in made if path.stat().st_mode & 0o022]


@pytest.mark.parametrize("verb", ["start", "stop", "logs", "files", "status"])
def test_a_run_id_cannot_leave_the_root(container: FakeContainer, verb: str) -> None:
    fields = {"spec": container.spec("")} if verb == "start" else {}
    assert container.error(verb, run_id="../r1", **fields)["kind"] == "usage"


@pytest.mark.parametrize("name", ["../r1", "", ".hidden", "a/b", "r1\n", "x" * 200, "-rf", "é", "a\0b"])
def test_no_name_leaves_its_folder(name: str) -> None:
    layout = Layout.at("/opt/dflash")
    for place in (layout.run, layout.cache, layout.archive, layout.release, layout.venv):
        with pytest.raises(PayloadError) as raised:
            place(name)
        assert raised.value.kind == "usage"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"venv": "1" * 16}, "refused"),
        ({"release": "1" * 16}, "refused"),
        ({"venv": "../../bin"}, "usage"),
        ({"cache": "../x"}, "usage"),
        ({"command": "rm -rf"}, "usage"),
        ({"command": []}, "usage"),
        ({"env": {"A=B": "x"}}, "usage"),
        ({"env": {"A": "x\0y"}}, "usage"),
        ({"secrets": {"A": 1}}, "usage"),
        ({"run_id": "other"}, "usage"),
    ],
)
def test_a_spec_that_cannot_run_is_refused_before_anything_is_made(
    container: FakeContainer, changes: dict[str, object], kind: str
) -> None:
    error = container.error("start", run_id="r1", spec={**container.spec(""), **changes})
    assert error["kind"] == kind
    assert not (container.root / "runs/r1").exists()


def test_the_last_metrics_are_the_newest_of_each_kind_in_whole_lines(container: FakeContainer) -> None:
    lines = ['{"step": 1, "loss": 2.5}', '{"step": 2, "accepted_length": 3.0, "loss": null}', '{"st']
    container.start("r1", f"open('metrics.jsonl', 'w').write({chr(10).join(lines)!r})")
    newest = container.wait_for_state("r1", "finished")["last_metrics"]
    assert newest == {"step": 2, "loss": 2.5, "accepted_length": 3.0}


def test_the_last_held_out_length_is_told_however_many_steps_ago_it_was_measured(
    container: FakeContainer,
) -> None:
    program = (
        "file = open('metrics.jsonl', 'w')\n"
        'file.write(\'{"step": 0, "accepted_length": 1.5}\\n{"step": 1, "accepted_length": null}\\n\')\n'
        'for n in range(4000): file.write(\'{"step": %d, "simulated_accepted_length": 9}\\n\' % n)\n'
    )
    container.start("r1", program)
    newest = container.wait_for_state("r1", "finished")["last_metrics"]
    assert (newest["step"], newest["accepted_length"]) == (3999, 1.5)


def test_a_run_tells_its_recipe_and_the_steps_of_its_whole_checkpoints(container: FakeContainer) -> None:
    container.start("r1", "pass", recipe={"name": "mine", "train": {"steps": 300}}, resume_from="../r0")
    checkpoints = container.root / "runs/r1/checkpoints"
    for name in ("step-000100", "step-000300", "step-1000000", ".step-000400.half"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "manifest.json").touch()
    (checkpoints / "step-000200").mkdir()
    run = container.wait_for_state("r1", "finished")
    assert (run["recipe"], run["steps"], run["resumed"]) == ("mine", 300, "r0")
    assert run["checkpoints"] == [100, 300, 1_000_000]


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
