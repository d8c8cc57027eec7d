"""Many containers at once, on embedded nodes of this machine: all on one host, and over eight beside two bad ones."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from orchestrator.localnode import node
from orchestrator.localnode.server import ServerOptions

SSHD = ServerOptions(max_sessions=10, max_startups=10)
"""OpenSSH's MaxSessions, and the first of MaxStartups 10:30:100."""
HOSTS = 8
_REPOSITORY = Path(__file__).resolve().parent.parent


def measure(folder: Path, containers: int) -> dict[str, float]:
    """Seconds of whole commands over ``containers`` containers, on one host and on eight.

    Everything runs on this machine: its cores do the work of all hosts and containers as well.
    """
    found: dict[str, float] = {}
    with _hosts(folder / "one", 1, containers) as hosts:
        inventory = _inventory(folder / "one.yaml", hosts)
        found |= _commands(inventory, f"{containers} on one host")
    with _hosts(folder / "eight", HOSTS, containers) as hosts, _bad(hosts) as bad:
        found |= _commands(_inventory(folder / "eight.yaml", hosts), f"{containers} on {HOSTS} hosts")
        inventory = _inventory(folder / "bad.yaml", {**hosts, **bad})
        found["the last good answer beside a closed and a silent host"] = _last_good_answer(
            inventory, set(hosts)
        )
    return found


def _commands(inventory: Path, where: str) -> dict[str, float]:
    found = {}
    for name, verb in (("first deploy", "deploy"), ("no-op deploy", "deploy"), ("status", "status")):
        began = time.monotonic()
        subprocess.run(
            _command(inventory, verb), cwd=_REPOSITORY, env=_environment(), check=True, capture_output=True
        )
        found[f"{name}, {where}"] = time.monotonic() - began
    return found


def _last_good_answer(inventory: Path, good: set[str]) -> float:
    """Seconds until the last row of a container whose host answers; the command goes on until the bad are given up."""
    began = last = time.monotonic()
    with subprocess.Popen(
        _command(inventory, "status"),
        cwd=_REPOSITORY,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.split("\t")[0] in good:
                last = time.monotonic()
    return last - began


def _command(inventory: Path, verb: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator.cli", verb, "--all", "--inventory", str(inventory)]


def _environment() -> dict[str, str]:
    """Without what make exports of its own command line: that is the container of the other parts."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_")}


@contextlib.contextmanager
def _hosts(folder: Path, hosts: int, containers: int) -> Iterator[dict[str, Any]]:
    """So many nodes with so many containers in all; their part of an inventory."""
    found: dict[str, Any] = {}
    try:
        for number in range(hosts):
            info = node.start(folder / str(number), options=SSHD)
            for extra in range(1, containers // hosts):
                info = node.add_container(folder / str(number), str(200 + extra))
            found[f"host{number}"] = yaml.safe_load(info.inventory.read_text())["hosts"]["local"]
        yield found
    finally:
        for number in range(hosts):
            if (folder / str(number)).exists():
                node.stop(folder / str(number))


@contextlib.contextmanager
def _bad(hosts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A host where nothing listens, and one that accepts a connection and says nothing."""
    with socket.socket() as closed, socket.socket() as silent:
        for listener in (closed, silent):
            listener.bind(("127.0.0.1", 0))
        silent.listen(16)
        like = next(iter(hosts.values()))
        yield {
            name: like | {"port": listener.getsockname()[1]}
            for name, listener in (("closed", closed), ("silent", silent))
        }


def _inventory(path: Path, hosts: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"hosts": hosts}))
    return path
