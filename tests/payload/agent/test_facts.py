"""Facts for a preflight: what holds a GPU or a port is named by pid, command and run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from payload.agent import holders
from payload.places import place
from tests.payload.agent.container import FakeContainer


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that bears the mark of a run."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", "a word"],
        env={**os.environ, "DFLASH_RUN_ID": "20261130-101010-abcdef"},
    )
    yield process
    process.kill()
    process.wait(10)


def test_facts_are_cheap_on_a_machine_without_a_gpu(container: FakeContainer) -> None:
    began = time.monotonic()
    facts = container.result("facts")
    assert time.monotonic() - began < 10  # 0.2 s where nothing else runs
    assert facts["gpu_processes"] == []
    assert facts["release"] == container.release
    assert facts["writable"] is True


def test_a_port_is_free_when_none_is_asked_for(container: FakeContainer) -> None:
    assert container.result("facts")["port"]["free"] is True


def test_the_holder_of_a_port_is_named(container: FakeContainer) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        number = listener.getsockname()[1]
        found = container.result("facts", port=number)["port"]
    assert found["free"] is False
    assert found["number"] == number
    assert found["holder"]["pid"] == os.getpid()
    assert "python" in found["holder"]["command"]


def test_a_number_that_no_port_has_is_refused(container: FakeContainer) -> None:
    assert container.error("facts", port=65536)["kind"] == "usage"


def test_a_port_that_cannot_be_used_says_why() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        assert "in use" in holders.port(listener.getsockname()[1])["reason"]


def test_a_process_of_a_run_is_named_with_its_run(sleeper: subprocess.Popen[bytes]) -> None:
    for _ in range(100):
        found = holders.describe(sleeper.pid)
        if found["command"] and "a word" in found["command"]:
            break
        time.sleep(0.05)
    assert found["run_id"] == "20261130-101010-abcdef"
    assert "time.sleep(60)" in found["command"]


def test_a_process_that_is_gone_is_only_a_pid() -> None:
    process = subprocess.Popen(["true"])
    process.wait(10)
    assert holders.describe(process.pid) == {"pid": process.pid, "command": None, "run_id": None}


def test_whoever_has_a_gpu_node_open_holds_a_gpu(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [(sleeper.pid, "/dev/nvidia3"), (sleeper.pid, "/dev/nvidiactl"), (os.getpid(), "/dev/null")]
    monkeypatch.setattr(holders, "_open_files", lambda: iter(files))
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/nvidia3")]))
    [found] = holders.gpu_processes([])
    assert (found["pid"], found["nodes"]) == (sleeper.pid, ["/dev/nvidia3"])


def test_a_holder_that_only_the_driver_names_is_told_as_well() -> None:
    assert [found["pid"] for found in holders.gpu_processes([2**22 + 1])] == [2**22 + 1]


NAMES = [
    "data/rows.jsonl",
    "./data",
    "data/../data/rows.jsonl",
    "data/pipe",
    "none",
    "~/none",
    "/etc/passwd",
    "/none",
]


def test_paths_of_a_recipe_are_told_as_the_trainer_takes_them(
    container: FakeContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (container.root / "data").mkdir()
    (container.root / "data/rows.jsonl").write_text("{}\n")
    os.mkfifo(container.root / "data/pipe")
    found = container.result("facts", paths=[*NAMES, "a\0b", "~no-such-user/x", "x" * 5000])["paths"]
    monkeypatch.setenv("DFLASH_ROOT", str(container.root))
    monkeypatch.setenv("HOME", container.environment["HOME"])
    for name in NAMES:
        assert found[name]["path"] == str(place(name))
    kinds = ["file", "folder", "file", "other", None, None, "file", None]
    assert [found[name]["kind"] for name in NAMES] == kinds
    assert found["data/rows.jsonl"]["bytes"] == 3
    assert {found[name]["kind"] for name in found if name not in NAMES} == {None}


def test_runs_that_are_going_on_are_told_and_a_damaged_one_hides_none(container: FakeContainer) -> None:
    assert container.result("facts")["runs"] == []
    container.start("r1", "import time; time.sleep(60)")
    container.wait_for_state("r1", "running")
    (container.root / "runs" / "damaged").mkdir()
    (container.root / "runs" / "damaged" / "state.json").write_text("{")
    assert container.result("facts")["runs"] == [{"run_id": "r1", "state": "running"}]
    container.result("stop", run_id="r1", grace_s=0.5)
    assert container.result("facts")["runs"] == []
