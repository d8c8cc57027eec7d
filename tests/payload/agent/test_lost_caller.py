"""Whoever asked is gone: what the agent ran for them ends, wholly, whatever else happens meanwhile."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.payload.agent.container import FakeContainer, is_running, until, wait_until_written

# It speaks until nobody listens, and has a child that minds neither TERM nor a closed pipe.
TALKS = b"""#!/usr/bin/env python3
import os, signal, sys, time
from pathlib import Path
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setsid()
    Path(sys.argv[1]).write_text(str(os.getpid()))
    time.sleep(600)
while True:
    print("still here", flush=True)
    time.sleep(0.01)
"""


def asking_for(verb: str, pids: Path) -> dict[str, Any]:
    if verb == "call":
        return {"module": "payload.talks", "env": {"PIDS": str(pids)}}
    content = base64.b64encode(TALKS).decode()
    return {
        "name": "talks",
        "content": content,
        "sha256": hashlib.sha256(TALKS).hexdigest(),
        "args": [str(pids)],
    }


@pytest.mark.parametrize("verb", ["script", "call"])
def test_what_a_verb_ran_is_ended_wholly_though_signals_come_while_it_is_being_ended(
    container: FakeContainer, tmp_path: Path, verb: str
) -> None:
    asked = container.open(verb, **asking_for(verb, tmp_path / "pid"))
    child = int(wait_until_written(tmp_path / "pid"))
    parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    assert asked.stdout is not None
    asked.stdout.close()
    for _ in until(5, every_s=0.01):
        if not is_running(parent):
            break
    # TERM has ended the parent, and the child's time of grace has begun.
    assert asked.poll() is None
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(asked.pid, number)
        time.sleep(0.05)
    try:
        assert asked.wait(20) == 1
        assert not is_running(child)
    finally:
        if is_running(child):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_verb_and_what_it_ran(
    container: FakeContainer, tmp_path: Path, number: signal.Signals
) -> None:
    asked = container.open("call", module="payload.hangs", env={"PIDS": str(tmp_path / "pid")})
    pids = [int(wait_until_written(tmp_path / f"pid.{name}")) for name in ("module", "grandchild")]
    os.kill(asked.pid, number)
    asked.communicate(timeout=20)
    assert asked.returncode == 1
    assert not [pid for pid in pids if is_running(pid)]
