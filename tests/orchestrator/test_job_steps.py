"""A job's life from the desk: started once, followed byte for byte across broken links, stopped, fetched verified.

The job is a plain Python program, so no torch is needed: the venv is a folder with an interpreter in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent import Agent, NoAnswer
from orchestrator.connection import Connection
from orchestrator.console import Console
from orchestrator.container import Container
from orchestrator.deploy import PAYLOAD, Payload, deploy
from orchestrator.errors import RefusedError, RemoteError, TransportError, UsageError
from orchestrator.fetch import fetch
from orchestrator.inventory import Destination
from orchestrator.localnode.node import NodeInfo
from orchestrator.logs import show_logs
from orchestrator.records import load_record, new_run_id
from orchestrator.status import newest_run, status, stop
from orchestrator.train import Prepared, prepare, start_job
from orchestrator.warmup import Warmed
from payload.agent.release import tree_hash
from payload.recipe import load_recipe
from tests.program_runs import VENV, spec

QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def records_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def agent(container: Container) -> Iterator[Agent]:
    """The deployed release's agent, and a venv that is only an interpreter."""
    with QUIET.step("deploy") as report:
        deployed = deploy(container, report)
    python = Path(container.settings.root) / "venvs" / VENV / "bin" / "python"
    if not python.exists():
        python.parent.mkdir(parents=True)
        python.symlink_to(container.settings.python)
    agent = Agent.of_release(container, deployed.release)
    yield agent
    for run in status(agent)["runs"]:
        if run["state"] in ("starting", "running", "stopping"):
            end(agent, run["run_id"])


def start(agent: Agent, program: str, run_id: str | None = None) -> str:
    run_id = run_id or new_run_id()
    agent.call("start", {"run_id": run_id, "spec": spec(run_id, program)})
    return run_id


def end(agent: Agent, run_id: str) -> str:
    with QUIET.step("stop") as report:
        return str(stop(agent, run_id, report, grace_s=1.0)["state"])


def test_a_second_deploy_finds_the_release_there(container: Container) -> None:
    with QUIET.step("deploy") as report:
        first = deploy(container, report)
        second = deploy(container, report)
    assert first.release == second.release == tree_hash(PAYLOAD)
    assert second.already_there


def test_a_release_that_was_tampered_with_is_replaced(container: Container, agent: Agent) -> None:
    file = Path(container.settings.root) / "releases" / tree_hash(PAYLOAD) / "payload" / "errors.py"
    whole = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(whole + b"# changed\n")
    with QUIET.step("deploy") as report:
        assert not deploy(container, report).already_there
    assert file.read_bytes() == whole


def test_an_earlier_payload_becomes_current_again(container: Container, agent: Agent, tmp_path: Path) -> None:
    other = tmp_path / "payload"
    shutil.copytree(PAYLOAD, other, ignore=shutil.ignore_patterns("__pycache__"))
    (other / "note.txt").write_text("another release")
    current = Path(container.settings.root) / "current"
    with QUIET.step("deploy") as report:
        changed = deploy(container, report, Payload(other))
        assert current.resolve().name == changed.release
        back = deploy(container, report)
    assert back.already_there
    assert current.resolve().name == back.release != changed.release


def test_a_container_without_a_release_says_to_deploy(
    connection: Connection, destination: Destination
) -> None:
    settings = replace(destination.container, root=destination.container.root + "-empty")
    container = Container(connection, replace(destination, container=settings))
    with pytest.raises(NoAnswer) as raised:
        Agent.current(container).call("status")
    assert "make deploy HOST=local CT=200" in raised.value.hint


def test_a_container_without_its_python_says_which_one_is_missing(
    connection: Connection, destination: Destination
) -> None:
    settings = replace(destination.container, python="python9")
    container = Container(connection, replace(destination, container=settings))
    with pytest.raises(NoAnswer) as raised:
        Agent.current(container).call("status")
    assert "Python 3.9 or newer as python9" in raised.value.hint


def test_a_log_is_followed_to_its_end_byte_for_byte(container: Container, agent: Agent) -> None:
    program = (
        "import sys, time\n"
        "for n in range(200):\n"
        "    sys.stdout.buffer.write(b'%d \\xff\\xfe \\r' % n + bytes([n]) + b'\\n')\n"
        "    sys.stdout.flush()\n"
        "    time.sleep(.003)\n"
    )
    run_id = start(agent, program)
    seen = bytearray()
    log_end = show_logs(agent, seen.extend, run_id=run_id, follow=True)
    assert log_end.state == "finished"
    assert bytes(seen) == b"".join(b"%d \xff\xfe \r" % n + bytes([n]) + b"\n" for n in range(200))


def test_following_goes_on_at_the_same_byte_after_the_link_broke(
    container: Container, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.logs._FIRST_WAIT_S", 0.05)
    run_id = start(agent, "import time\nfor n in range(300): print('line', n); time.sleep(.01)")
    seen = bytearray()
    cuts = iter([50, 400, 900, 1800])
    due = [next(cuts)]

    def write(data: bytes) -> None:
        seen.extend(data)
        if due and len(seen) > due[0]:
            due[:] = [cut for cut in [next(cuts, 0)] if cut]
            assert container.connection._fabric is not None
            container.connection._fabric.transport.sock.shutdown(socket.SHUT_RDWR)

    notes: list[str] = []
    log_end = show_logs(agent, write, run_id=run_id, follow=True, notify=notes.append)
    assert log_end.state == "finished"
    assert seen.decode() == "".join(f"line {n}\n" for n in range(300))
    assert len(notes) == 4


def test_tail_shows_the_last_lines_and_logs_without_follow_return(agent: Agent) -> None:
    run_id = start(agent, "for n in range(1000): print(n)")
    show_logs(agent, lambda _: None, run_id=run_id, follow=True)
    seen = bytearray()
    show_logs(agent, seen.extend, run_id=run_id, tail_lines=3)
    assert seen.decode().split() == ["997", "998", "999"]


def test_logs_of_a_run_that_is_not_there_are_a_usage_error(agent: Agent) -> None:
    with pytest.raises(UsageError, match="20200101-000000-abcdef"):
        show_logs(agent, lambda _: None, run_id="20200101-000000-abcdef")


def test_the_same_run_id_is_started_once(container: Container, agent: Agent) -> None:
    run_id = start(agent, "import time; print('started'); time.sleep(1)")
    start(agent, "print('a second time')", run_id)
    seen = bytearray()
    show_logs(agent, seen.extend, run_id=run_id, follow=True)
    assert seen.decode() == "started\n"


def test_a_second_job_is_refused_while_one_runs_and_is_told_how_to_attach(agent: Agent) -> None:
    run_id = start(agent, "import time; time.sleep(60)")
    with pytest.raises(RefusedError, match=run_id) as raised:
        start(agent, "print('never')")
    assert raised.value.exit_status == 4
    assert "logs" in raised.value.hint
    assert newest_run(agent, active=True) == run_id
    assert end(agent, run_id) == "stopped"


def test_stop_ends_children_that_ignore_the_asking(agent: Agent, folder: Path) -> None:
    child = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    run_id = start(
        agent,
        "import subprocess, sys, time\n"
        f"child = [sys.executable, '-c', {child!r}, {str(folder / 'pid')!r}]\n"
        "subprocess.Popen(child, start_new_session=True)\n"
        "time.sleep(60)\n",
    )
    deadline = time.monotonic() + 10
    while not (folder / "pid").exists() or not (folder / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert end(agent, run_id) == "stopped"
    assert not Path(f"/proc/{(folder / 'pid').read_text()}").exists()


def test_there_is_nothing_to_stop_when_nothing_runs(agent: Agent) -> None:
    with pytest.raises(UsageError, match="no run is going on"):
        newest_run(agent, active=True)


def test_a_failed_job_is_failed_with_its_exit_code(agent: Agent) -> None:
    run_id = start(agent, "raise SystemExit(9)")
    assert show_logs(agent, lambda _: None, run_id=run_id, follow=True).state == "failed"
    [run] = status(agent, run_id)["runs"]
    assert (run["state"], run["exit_code"]) == ("failed", 9)


def test_fetch_brings_complete_checkpoints_home_and_only_what_is_new(
    container: Container, agent: Agent, tmp_path: Path
) -> None:
    run_id = start(agent, "print('done')")
    show_logs(agent, lambda _: None, run_id=run_id, follow=True)
    checkpoints = Path(container.settings.root) / "runs" / run_id / "checkpoints"
    (checkpoints / "step-000010" / "drafter").mkdir(parents=True)
    (checkpoints / "step-000010" / "drafter" / "model.safetensors").write_bytes(bytes(range(256)) * 4000)
    (checkpoints / "step-000010" / "manifest.json").write_text("{}")
    (checkpoints / "step-000020").mkdir()
    (checkpoints / "step-000020" / "half").write_bytes(b"half-written: no manifest yet")
    with QUIET.step("fetch") as report:
        fetched = fetch(container, agent, run_id, tmp_path, report)
        again = fetch(container, agent, run_id, tmp_path, report)
    home = tmp_path / run_id
    assert fetched.folder == home
    assert (home / "output.log").read_text() == "done\n"
    model = home / "checkpoints" / "step-000010" / "drafter" / "model.safetensors"
    assert hashlib.sha256(model.read_bytes()).digest() == hashlib.sha256(bytes(range(256)) * 4000).digest()
    assert not (home / "checkpoints" / "step-000020").exists()
    assert json.loads((home / "state.json").read_text())["state"] == "finished"
    assert (fetched.new_files, again.new_files) == (fetched.files, 0)


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "checkpoints/../../outside"])
def test_fetch_writes_nothing_outside_its_folder(
    container: Container, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hostile(Agent):
        def call(self, verb: str, request: Any = None, **options: Any) -> dict[str, Any]:
            return {"files": [{"path": path, "size": 1, "sha256": "0" * 64}]}

    with pytest.raises(RemoteError, match="is no path of a file in the run"), QUIET.step("fetch") as report:
        fetch(container, Hostile(container, "agent"), "20200101-000000-abcdef", tmp_path / "home", report)
    assert not (tmp_path / "home").exists()
    assert not (tmp_path / "outside").exists()


def test_an_answer_without_the_nonce_is_no_answer(container: Container, folder: Path) -> None:
    forged = folder / "agent.py"
    forged.write_text('print(\'{"nonce": "forged", "result": {}}\')\nprint(\'\\x1b[2Jnoise\')\n')
    with pytest.raises(NoAnswer, match="gave no answer"):
        Agent(container, str(forged)).call("hello")


def test_a_last_line_in_a_hundred_pieces_and_noise_around_it_is_an_answer(
    container: Container, folder: Path
) -> None:
    chatty = folder / "agent.py"
    chatty.write_text(
        "import json, sys, time\n"
        "request = json.loads(sys.stdin.readline())\n"
        "print('a library says hello')\n"
        "line = json.dumps({'nonce': request['nonce'], 'result': {'text': 'x' * 10000}})\n"
        "for n in range(0, len(line), 100):\n"
        "    sys.stdout.write(line[n:n + 100]); sys.stdout.flush()\n"
        "print()\n"
        "sys.exit(3)\n"
    )
    assert Agent(container, str(chatty)).call("hello") == {"text": "x" * 10000}


def test_a_line_without_end_is_given_up(
    container: Container, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.agent.LINE_LIMIT_BYTES", 1_000_000)
    endless = folder / "agent.py"
    endless.write_text("import sys\nwhile True: sys.stdout.write('x' * 65536)\n")
    with pytest.raises(TransportError, match="a line of more than"):
        Agent(container, str(endless)).call("hello", timeout_s=20)


def test_a_start_whose_answer_was_lost_is_asked_again_and_starts_once(
    container: Container, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request arrives, the job starts, and the link breaks before the answer."""
    calls: list[str] = []
    ask = Agent.call

    def lose_the_first_answer(self: Agent, verb: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        answer = ask(self, verb, *arguments, **options)
        calls.append(verb)
        if calls == ["start"]:
            raise NoAnswer("the link broke")
        return answer

    monkeypatch.setattr(Agent, "call", lose_the_first_answer)
    prepared = Prepared(agent, tree_hash(PAYLOAD), VENV, Warmed("unnamed", False, 0.0, 0, 0, ""))
    monkeypatch.setattr("orchestrator.train.torchrun_command", lambda *_, **__: ["-c", "print('once')"])
    run_id = start_job(container, prepared, load_recipe("tiny-cpu"), QUIET)
    assert calls == ["start", "start"]
    seen = bytearray()
    show_logs(agent, seen.extend, run_id=run_id, follow=True)
    assert seen == b"once\n"
    record = load_record(run_id)
    assert record is not None
    assert (record.host, record.container, record.venv) == ("local", "200", VENV)


def test_training_is_refused_before_anything_is_built_while_a_job_runs(
    container: Container, agent: Agent
) -> None:
    run_id = start(agent, "import time; time.sleep(60)")
    with pytest.raises(RefusedError, match=run_id) as raised:
        prepare(container, load_recipe("tiny-cpu"), QUIET)
    assert f"make logs FOLLOW=1 RUN_ID={run_id} HOST=local CT=200" in raised.value.hint
    end(agent, run_id)


def test_ctrl_c_while_following_leaves_the_job_running_and_says_how_to_attach(
    agent: Agent, local_node: NodeInfo, tmp_path: Path
) -> None:
    run_id = start(agent, "import time\nfor n in range(600): print('line', n); time.sleep(.1)")
    follower = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "orchestrator.cli",
            "logs",
            run_id,
            "--follow",
            "--host",
            "local",
            "--ct",
            "200",
        ],
        env={**os.environ, "DFLASH_INVENTORY": str(local_node.inventory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    assert follower.stdout.readline() == "line 0\n"
    follower.send_signal(signal.SIGINT)
    _, words = follower.communicate(timeout=20)
    assert follower.returncode == 130
    assert "the job goes on" in words
    assert f"make logs FOLLOW=1 RUN_ID={run_id} HOST=local CT=200" in words
    assert "Traceback" not in words
    assert status(agent, run_id)["runs"][0]["state"] == "running"


def test_a_job_that_cannot_be_started_is_an_error_and_not_a_started_run(
    container: Container, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.train.torchrun_command", lambda *_, **__: ["-c", "x" * 200_000])
    prepared = Prepared(agent, tree_hash(PAYLOAD), VENV, None)
    with pytest.raises(RemoteError, match="did not start"):
        start_job(container, prepared, load_recipe("tiny-cpu"), QUIET)


def test_a_checkpoint_that_the_job_removes_during_a_fetch_is_left_out_whole(
    container: Container, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = start(agent, "print('done')")
    show_logs(agent, lambda _: None, run_id=run_id, follow=True)
    checkpoints = Path(container.settings.root) / "runs" / run_id / "checkpoints"
    for step in ("step-000010", "step-000020"):
        (checkpoints / step).mkdir(parents=True)
        for name in ("a.safetensors", "b.safetensors", "manifest.json"):
            (checkpoints / step / name).write_text(f"{step} {name}")
    download = Container.download

    def remove_after_the_first(self: Container, path: str, *arguments: Any, **options: Any) -> None:
        download(self, path, *arguments, **options)
        if "step-000010" in path:
            shutil.rmtree(checkpoints / "step-000010")

    monkeypatch.setattr(Container, "download", remove_after_the_first)
    with QUIET.step("fetch") as report:
        fetched = fetch(container, agent, run_id, tmp_path, report)
    assert [path.name for path in (fetched.folder / "checkpoints").iterdir()] == ["step-000020"]
    assert (fetched.folder / "checkpoints" / "step-000020" / "b.safetensors").exists()


def test_two_fetches_into_one_folder_do_not_write_into_each_other(
    container: Container, agent: Agent, tmp_path: Path
) -> None:
    run_id = start(agent, "print('done')")
    show_logs(agent, lambda _: None, run_id=run_id, follow=True)
    (tmp_path / run_id).mkdir()
    descriptor = os.open(tmp_path / run_id, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(RefusedError, match="Another fetch"), QUIET.step("fetch") as report:
            fetch(container, agent, run_id, tmp_path, report)
    finally:
        os.close(descriptor)
