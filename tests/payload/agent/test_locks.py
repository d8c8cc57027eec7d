"""Who changes a container is shown, with since when; a holder that hangs can be ended, and then holds nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from payload.agent import locks
from payload.agent.layout import Layout
from tests.payload.agent.container import FakeContainer, is_running, until

HOLDS = """
import sys, time
sys.path.insert(0, sys.argv[1])
from payload.agent.layout import Layout
from payload.agent.locks import hold
with hold(Layout.at(sys.argv[2]), "venv", "venv", "ann@desk"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(container: FakeContainer) -> subprocess.Popen[str]:
    """A process that holds the lock `venv` and hangs."""
    release = str(container.root / "releases" / container.release)
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", HOLDS, release, str(container.root)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_that_is_held_is_shown_with_its_holder_and_age(
    container: FakeContainer, holder: subprocess.Popen[str]
) -> None:
    time.sleep(0.2)
    [lock] = container.result("locks")["locks"]
    assert (lock["name"], lock["verb"], lock["holder"], lock["pid"]) == (
        "venv",
        "venv",
        "ann@desk",
        holder.pid,
    )
    assert 0.2 <= lock["age_s"] < 30
    holder.kill()
    holder.wait()
    assert container.result("locks")["locks"] == []


def test_who_finds_a_lock_held_is_told_by_whom_and_how_to_break_it(
    container: FakeContainer, holder: subprocess.Popen[str]
) -> None:
    busy = container.error("prune")
    assert busy["kind"] == "busy"
    assert "held by ann@desk for" in busy["message"]
    assert "make locks BREAK=venv" in busy["hint"]
    holder.kill()
    holder.wait()


def test_breaking_a_lock_ends_its_holder_and_frees_it(
    container: FakeContainer, holder: subprocess.Popen[str]
) -> None:
    assert container.result("locks", **{"break": "venv"}) == {"locks": [], "broken": "venv"}
    holder.wait(10)
    assert "removed" in container.result("prune")


def test_a_lock_that_nobody_holds_cannot_be_broken(container: FakeContainer) -> None:
    assert container.error("locks", **{"break": "venv"})["kind"] == "usage"


def test_a_process_that_got_the_pid_of_a_dead_holder_is_not_ended(
    container: FakeContainer, tmp_path: Path
) -> None:
    innocent = subprocess.Popen(["sleep", "600"])
    entry = {"pid": innocent.pid, "start_time": 1, "boot_id": "", "verb": "venv", "holder": "", "since": 0}
    (container.root / "locks").mkdir(exist_ok=True)
    (container.root / "locks/venv.lock").write_text(json.dumps(entry))
    assert container.error("locks", **{"break": "venv"})["kind"] == "usage"
    for _ in until(0.3):
        assert is_running(innocent.pid)
    innocent.kill()
    innocent.wait()


@pytest.mark.parametrize("since", ["-Infinity", "Infinity", "NaN", "-1e999", "1e300"])
def test_the_age_of_a_lock_is_a_number_whatever_stands_in_it(container: FakeContainer, since: str) -> None:
    layout = Layout.at(str(container.root))
    with locks.hold(layout, "deploy", "receive", "ann@desk"):
        path = layout.locks / "deploy.lock"
        entry = json.loads(path.read_text())
        path.write_text(json.dumps(entry).replace(json.dumps(entry["since"]), since))
        [found] = container.result("locks")["locks"]
        assert 0 <= found["age_s"] < float("inf")
        assert "deploy" in container.error("prune", keep=1)["message"]


def test_a_lock_whose_block_failed_is_free_and_looks_free(container: FakeContainer) -> None:
    layout = Layout.at(str(container.root))
    container.start("r1", "")
    container.wait_for_state("r1", "finished")

    def fail() -> None:
        assert len(container.result("locks")["locks"]) == 1
        raise OSError("the disk is full")

    for held in (locks.hold(layout, "deploy", "receive", "ann@desk"), locks.hold_run(layout, "r1", 0)):
        with pytest.raises(OSError, match="full"), held:
            fail()
        assert container.result("locks")["locks"] == []
    # Not even a name is left of the holder, who lives on.
    assert {path.read_bytes() for path in container.root.rglob("*.lock")} == {b""}


def test_a_process_that_no_longer_holds_a_lock_is_neither_shown_nor_ended(
    container: FakeContainer, holder: subprocess.Popen[str]
) -> None:
    entry = (container.root / "locks/venv.lock").read_text()
    (container.root / "locks/deploy.lock").write_text(entry)
    assert [lock["name"] for lock in container.result("locks")["locks"]] == ["venv"]
    assert container.error("locks", **{"break": "deploy"})["kind"] == "usage"
    assert holder.poll() is None
    holder.kill()
    holder.wait()


def test_the_lock_of_a_run_lies_in_its_folder_and_can_be_broken(container: FakeContainer) -> None:
    container.start("r1", "")
    container.wait_for_state("r1", "finished")
    assert [path.name for path in (container.root / "locks").iterdir()] == ["jobs.lock"]
    release = str(container.root / "releases" / container.release)
    holds = HOLDS.replace("import hold\n", "import hold_run\n").replace(
        'hold(Layout.at(sys.argv[2]), "venv", "venv", "ann@desk")',
        'hold_run(Layout.at(sys.argv[2]), "r1", 0)',
    )
    hangs = subprocess.Popen(
        [sys.executable, "-I", "-c", holds, release, str(container.root)], stdout=subprocess.PIPE, text=True
    )
    assert hangs.stdout is not None
    assert hangs.stdout.readline() == "held\n"
    [lock] = container.result("locks")["locks"]
    assert (lock["name"], lock["pid"]) == ("run-r1", hangs.pid)
    assert container.result("locks", **{"break": "run-r1"})["locks"] == []
    hangs.wait(10)
