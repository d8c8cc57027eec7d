"""A log's way home: a backlog of 100 MB, and the time from a job's line to the desk's standard output."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from orchestrator.agent import Agent
from orchestrator.connection import Connection
from orchestrator.container import Container
from orchestrator.inventory import Destination
from orchestrator.records import new_run_id
from payload.agent.checksum import file_sha256

BACKLOG_BYTES = 100 * 10**6
LINES = 40
LINE_EVERY_S = 0.13
_VENV = "bbbbbbbbbbbbbbbb"
_REPOSITORY = Path(__file__).resolve().parent.parent

_BACKLOG = f"""
import hashlib, sys
line = b"".join(b"step %d/100  loss 1.234  accuracy 0.321  18.9 Ktok/s\\n" % i for i in range(10000))
left, digest = {BACKLOG_BYTES}, hashlib.sha256()
while left:
    data = line[:left]
    digest.update(data)
    sys.stdout.buffer.write(data)
    left -= len(data)
open("digest", "w").write(digest.hexdigest())
"""
# It waits until whoever follows is there.
_TICKER = f"""
import time
time.sleep(3)
for _ in range({LINES}):
    print(time.time(), flush=True)
    time.sleep({LINE_EVERY_S})
"""


def measure(destination: Destination) -> dict[str, float]:
    """Seconds of ``logs`` over the backlog, into a file, and of a line's way to ``logs --follow``'s standard output.

    The clocks of desk and container must be one, as they are where both are on one machine. Raises RuntimeError when
    what came home is not what the job wrote.
    """
    root = destination.container.root
    with Connection(destination.host_name, destination.host) as connection:
        container = Container(connection, destination)
        agent = Agent.current(container)
        # An interpreter is all of a venv that these jobs need.
        container.run(["mkdir", "-p", f"{root}/venvs/{_VENV}/bin"])
        interpreter = str(agent.call("facts")["python"]["path"])
        container.run(["ln", "-sfn", interpreter, f"{root}/venvs/{_VENV}/bin/python"])
        runs = []
        try:
            runs.append(_start(agent, _BACKLOG))
            _wait(agent, runs[0])
            digest = container.run(["cat", f"{root}/runs/{runs[0]}/digest"]).stdout.decode()
            backlog_s = min(_read_backlog(destination, runs[0], digest) for _ in range(3))
            runs.append(_start(agent, _TICKER))
            delays = _follow(destination, runs[1])
            _wait(agent, runs[1])
        finally:
            container.run(["rm", "-rf", f"{root}/venvs/{_VENV}", *(f"{root}/runs/{run}" for run in runs)])
    return {
        f"{BACKLOG_BYTES // 10**6} MB of backlog into a file": backlog_s,
        "a line to standard output, median": statistics.median(delays),
        "a line to standard output, slowest": max(delays),
    }


def _start(agent: Agent, program: str) -> str:
    run_id = new_run_id()
    spec = {
        "run_id": run_id,
        "release": agent.call("status")["release"],
        "venv": _VENV,
        "cache": None,
        "command": ["-u", "-c", program],
        "env": {},
        "recipe": {},
        "nproc": 1,
        "created_at": time.time(),
    }
    agent.call("start", {"run_id": run_id, "spec": spec})
    return run_id


def _wait(agent: Agent, run_id: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        [run] = agent.call("status", {"run_id": run_id})["runs"]
        if run["state"] == "finished":
            return
        time.sleep(0.2)
    raise RuntimeError(f"run {run_id} did not finish: {run}")


def _logs(destination: Destination, run_id: str, *options: str) -> list[str]:
    place = ["--inventory", str(destination.inventory), "--host", destination.host_name]
    place += ["--ct", destination.container_id]
    return [sys.executable, "-m", "orchestrator.cli", "logs", *place, *options, run_id]


def _read_backlog(destination: Destination, run_id: str, digest: str) -> float:
    with tempfile.NamedTemporaryFile() as home:
        began = time.monotonic()
        subprocess.run(
            _logs(destination, run_id), cwd=_REPOSITORY, stdout=home, stdin=subprocess.DEVNULL, check=True
        )
        seconds = time.monotonic() - began
        if file_sha256(Path(home.name)) != digest:
            raise RuntimeError("the backlog that came home is not what the job wrote")
    return seconds


def _follow(destination: Destination, run_id: str) -> list[float]:
    """Seconds from each line's moment, which it bears, to its arrival."""
    delays = []
    command = _logs(destination, run_id, "--follow")
    with subprocess.Popen(
        command, cwd=_REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    ) as following:
        assert following.stdout is not None
        for line in following.stdout:
            delays.append(time.time() - float(line))
    if len(delays) != LINES:
        raise RuntimeError(f"{len(delays)} of {LINES} lines came")
    return delays
