"""A job is started at most once, survives whoever started it, and keeps what it was given to itself."""

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
from tests.payload.agent.container import FakeContainer, is_running, wait_until_written
from tests.payload.agent.jobs import SLEEP, pids_in


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
