"""Prune removes what nothing needs: never what runs pin, what is active, or what somebody is using at the moment."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from payload.agent.usage import unused, using
from payload.errors import PayloadError
from tests.payload.agent.container import VENV, FakeContainer, Reply, make_payload, wait_until_written

OLD = (1_000_000, 1_000_000)
OTHER = "1" * 16
WAITS = b"""#!/usr/bin/env python3
import os, sys, time
open(sys.argv[1], "w").write(os.getcwd())
time.sleep(600)
"""


def test_prune_keeps_what_is_in_use_what_runs_pin_and_the_newest(container: FakeContainer) -> None:
    container.start("r1", "")
    container.wait_for_state("r1", "finished")
    releases, venvs = container.root / "releases", container.root / "venvs"
    for folder in (releases, venvs):
        for age, digit in enumerate("f12"):
            (folder / (digit * 16)).mkdir()
            os.utime(folder / (digit * 16), (1_000_000 - age, 1_000_000 - age))
        (folder / ".half.built").mkdir()
    young, old = container.root / "incoming/young.zip", container.root / "incoming/old.zip"
    for path in (young, old):
        path.touch()
    os.utime(old, (1_000_000, 1_000_000))
    half = container.root / "tools/.uv.half"
    half.parent.mkdir()
    half.touch()
    os.utime(half, (1_000_000, 1_000_000))
    (container.root / "cache/abc").mkdir(parents=True)
    removed = container.result("prune", keep=2)["removed"]
    assert sorted(removed) == sorted(
        ["incoming/old.zip", "tools/.uv.half"]
        + [f"{kind}/{name}" for kind in ("releases", "venvs") for name in ("1" * 16, "2" * 16, ".half.built")]
    )
    assert (releases / container.release).is_dir()
    assert (releases / ("f" * 16)).is_dir()
    assert young.exists()
    assert (container.root / "cache/abc").is_dir()


def test_prune_keeps_the_release_that_it_is_itself_of(container: FakeContainer) -> None:
    shutil.copytree(container.root / "releases" / container.release, container.root / "releases" / OTHER)
    (container.root / "current").unlink()
    (container.root / "current").symlink_to(f"releases/{OTHER}")
    assert container.result("prune", keep=0) == {"removed": []}
    assert container.agent.is_dir()


@pytest.fixture
def other(container: FakeContainer, tmp_path: Path) -> FakeContainer:
    """A container with an older release and an older venv, whose names are `OTHER`."""
    tree = make_payload(tmp_path / "other", ("hangs",))
    shutil.copytree(tree, container.root / "releases" / OTHER / "payload")
    shutil.copytree(container.root / "venvs" / VENV, container.root / "venvs" / OTHER, symlinks=True)
    for kind in ("releases", "venvs"):
        os.utime(container.root / kind / OTHER, OLD)
    return container


def script(container: FakeContainer, seen: Path, **fields: object) -> subprocess.Popen[bytes]:
    content = base64.b64encode(WAITS).decode()
    sha256 = hashlib.sha256(WAITS).hexdigest()
    return container.open("script", name="waits", content=content, sha256=sha256, args=[str(seen)], **fields)


def notes(reply: Reply) -> list[str]:
    return [event["message"] for event in reply.events if event["event"] == "note"]


def end(asked: subprocess.Popen[bytes]) -> None:
    asked.send_signal(signal.SIGTERM)
    asked.communicate(timeout=20)


def test_prune_leaves_the_release_and_the_venv_that_a_call_uses_and_says_so(
    other: FakeContainer, tmp_path: Path
) -> None:
    environment = {"PIDS": str(tmp_path / "pid")}
    asked = other.open("call", module="payload.hangs", release=OTHER, venv=OTHER, env=environment)
    wait_until_written(tmp_path / "pid.grandchild")
    reply = other.ask("prune", keep=0)
    assert reply.result == {"removed": []}
    assert notes(reply) == [f"{kind}/{OTHER} is in use: it stays" for kind in ("releases", "venvs")]
    end(asked)
    assert other.result("prune", keep=0) == {"removed": [f"releases/{OTHER}", f"venvs/{OTHER}"]}


def test_prune_leaves_the_release_and_the_venv_that_a_script_uses_though_others_are_active_by_now(
    other: FakeContainer, tmp_path: Path
) -> None:
    for link, kind in (("current", "releases"), ("venv", "venvs")):
        (other.root / link).unlink()
        (other.root / link).symlink_to(f"{kind}/{OTHER}")
    asked = script(other, tmp_path / "seen", venv=True)
    wait_until_written(tmp_path / "seen")
    for link, target in (("current", f"releases/{other.release}"), ("venv", f"venvs/{VENV}")):
        (other.root / link).unlink()
        (other.root / link).symlink_to(target)
    assert other.result("prune", keep=0) == {"removed": []}
    end(asked)
    assert other.result("prune", keep=0) == {"removed": [f"releases/{OTHER}", f"venvs/{OTHER}"]}


def test_prune_leaves_the_folder_of_a_script_that_has_been_at_work_for_hours(
    container: FakeContainer, tmp_path: Path
) -> None:
    asked = script(container, tmp_path / "seen")
    folder = Path(wait_until_written(tmp_path / "seen"))
    os.utime(folder, OLD)
    reply = container.ask("prune")
    assert reply.result == {"removed": []}
    assert notes(reply) == [f"incoming/{folder.name} is in use: it stays"]
    assert folder.is_dir()
    asked.kill()
    asked.communicate()
    # What a script leaves whose agent was killed goes once it is old.
    assert container.result("prune") == {"removed": [f"incoming/{folder.name}"]}


def test_what_is_being_removed_cannot_be_used_any_more(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    folder.mkdir()
    with unused(folder) as free, pytest.raises(PayloadError, match="just being removed"), using(folder):
        pass
    assert free
    with using(folder), using(folder), unused(folder) as free:
        assert not free
    with unused(folder) as free:
        assert free


def test_who_only_asks_whether_a_folder_is_in_use_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    folder.mkdir()
    asks = threading.Event()

    def ask() -> None:
        with unused(folder):
            asks.set()
            time.sleep(0.2)

    asking = threading.Thread(target=ask)
    asking.start()
    assert asks.wait(10)
    with using(folder):
        asking.join(10)
        with unused(folder) as free:
            assert not free


def test_a_folder_that_is_replaced_at_the_last_moment_is_not_the_one_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, old = tmp_path / "venv", tmp_path / "old"
    folder.mkdir()
    flock = fcntl.flock

    def replace_first(descriptor: int, how: int) -> None:
        if not old.exists():
            folder.rename(old)
            folder.mkdir()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", replace_first)
    with using(folder), unused(folder) as free, unused(old) as old_is_free:
        assert (free, old_is_free) == (False, True)
