"""Jobs for tests of the agent: what they run, and which processes they became."""

from __future__ import annotations

from pathlib import Path

from tests.payload.agent.container import until

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
