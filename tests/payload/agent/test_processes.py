"""A process is known by more than its pid, so that a signal reaches exactly the one that was meant."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from payload.agent import processes
from payload.agent.processes import ProcessId, identify, is_alive, send_signal


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture(params=["by handle", "by pid"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pidfds, and as on a kernel or a Python that has none."""
    if request.param == "by pid":
        monkeypatch.setattr(processes, "open_handle", lambda pid: None)


def identity_of(process: subprocess.Popen[bytes]) -> ProcessId:
    found = identify(process.pid)
    assert found is not None
    return found


def test_a_signal_reaches_the_process_that_was_meant(sleeper: subprocess.Popen[bytes]) -> None:
    assert send_signal(identity_of(sleeper), signal.SIGKILL)
    assert sleeper.wait(10) == -signal.SIGKILL


def test_another_process_with_the_pid_gets_no_signal(sleeper: subprocess.Popen[bytes]) -> None:
    own = identity_of(sleeper)
    for other in (replace(own, start_time=own.start_time - 1), replace(own, boot_id="another")):
        assert not send_signal(other, signal.SIGKILL)
    assert is_alive(own)


def test_a_process_that_has_ended_gets_no_signal(sleeper: subprocess.Popen[bytes]) -> None:
    own = identity_of(sleeper)
    sleeper.kill()
    assert sleeper.wait(10) == -signal.SIGKILL
    assert not send_signal(own, signal.SIGKILL)
