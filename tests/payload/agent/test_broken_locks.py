"""Who is ended by a broken lock is told so, and by whom."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.payload.agent.container import FakeContainer, parse, until
from tests.payload.agent.venvs import request

HOLDS = """
import sys, time
from payload.agent.layout import Layout
from payload.agent.locks import hold
from payload.agent.protocol import serve

def handler(request, events):
    with hold(Layout.at(request.root), "warmup-1", "warmup", "ann@desk"):
        time.sleep(600)

sys.exit(serve(handler))
"""


def answer(asked: subprocess.Popen[bytes]) -> dict[str, str]:
    """The error that ends an answer."""
    _, _, error = parse(asked.communicate(timeout=30)[0], "ab")
    assert error is not None
    return error


def until_held(container: FakeContainer, name: str) -> None:
    for _ in until():
        if [lock["name"] for lock in container.result("locks")["locks"]] == [name]:
            return


@pytest.fixture
def building(container: FakeContainer, tmp_path: Path) -> subprocess.Popen[bytes]:
    """A venv in the making that hangs, and holds the lock `venv`."""
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\nexec sleep 600\n")
    uv.chmod(0o755)
    asked = container.open("venv", **request(None, uv=str(uv), python="python9"))
    until_held(container, "venv")
    return asked


def test_a_verb_whose_lock_is_broken_ends_with_an_error_that_says_by_whom(
    container: FakeContainer, building: subprocess.Popen[bytes]
) -> None:
    assert container.result("locks", **{"break": "venv", "holder": "bob@desk"})["locks"] == []
    error = answer(building)
    assert error["message"] == "this was ended by bob@desk, who broke the lock 'venv'"
    assert error["kind"] == "failed"


def test_a_module_whose_lock_is_broken_is_told_of_in_the_same_words(container: FakeContainer) -> None:
    module = container.root / "releases" / container.release / "payload" / "holds.py"
    module.parent.chmod(0o755)
    module.write_text(HOLDS)
    asked = container.open("call", module="payload.holds")
    until_held(container, "warmup-1")
    container.result("locks", **{"break": "warmup-1", "holder": "bob@desk"})
    assert answer(asked)["message"] == "this was ended by bob@desk, who broke the lock 'warmup-1'"


def test_a_verb_that_is_ended_in_another_way_says_nothing_of_locks(
    container: FakeContainer, building: subprocess.Popen[bytes]
) -> None:
    building.send_signal(signal.SIGTERM)
    assert parse(building.communicate(timeout=30)[0], "ab")[2] is None
    assert container.result("locks")["locks"] == []
