"""A real node for the tests of this folder, and two SSH clients that have nothing in common."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh
import paramiko
import pytest

from orchestrator.localnode import node
from orchestrator.localnode.node import NodeInfo
from orchestrator.localnode.server import ServerOptions

NO_PIP_SETTINGS = {"PIP_CONFIG_FILE": "/dev/null"}
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Done:
    status: int
    stdout: bytes
    stderr: bytes


@pytest.fixture(scope="session")
def running_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeInfo]:
    """One node for all tests that leave it as they found it."""
    state = tmp_path_factory.mktemp("node") / "state"
    info = node.start(state, environment=NO_PIP_SETTINGS)
    yield info
    node.stop(state)
    for log in [state / "log/server.log", *state.glob("containers/*/init.log")]:
        assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture
def fresh_node(tmp_path: Path) -> Iterator[Callable[..., NodeInfo]]:
    """Starts a node of the test's own, with the given server options."""
    state = tmp_path / "state"

    def start(**options: Any) -> NodeInfo:
        return node.start(state, options=ServerOptions(**options), environment=NO_PIP_SETTINGS)

    yield start
    node.stop(state)


def state_of(info: NodeInfo) -> Path:
    return info.inventory.parent


def rootfs_of(info: NodeInfo, container_id: str = "200") -> Path:
    return state_of(info) / "containers" / container_id / "rootfs"


def paramiko_client(info: NodeInfo, **options: Any) -> paramiko.SSHClient:
    """A client with strict host keys; ``options`` replace the login."""
    client = paramiko.SSHClient()
    client.load_host_keys(str(options.pop("known_hosts", info.known_hosts)))
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    login = {"username": info.user, "key_filename": str(info.client_key)} | options
    client.connect(
        info.address, info.port, allow_agent=False, look_for_keys=False, timeout=10, auth_timeout=10, **login
    )
    return client


@pytest.fixture(scope="session")
def client(running_node: NodeInfo) -> Iterator[paramiko.SSHClient]:
    with paramiko_client(running_node) as connected:
        yield connected


def transport_of(client: paramiko.SSHClient) -> paramiko.Transport:
    transport = client.get_transport()
    assert transport is not None
    return transport


def run(client: paramiko.SSHClient, command: str | bytes, stdin: bytes = b"") -> Done:
    """Run one command string; for outputs that fit in the channel's window."""
    with transport_of(client).open_session(timeout=TIMEOUT_S) as channel:
        channel.settimeout(TIMEOUT_S)
        channel.exec_command(command)
        with contextlib.suppress(OSError):  # the command may end before it has read everything
            channel.sendall(stdin)
            channel.shutdown_write()
        stdout = channel.makefile("rb").read()
        stderr = channel.makefile_stderr("rb").read()
        return Done(channel.recv_exit_status(), stdout, stderr)


def pct_over_ssh(client: paramiko.SSHClient, *words: str, stdin: bytes = b"") -> Done:
    return run(client, shlex.join(["pct", *words]).encode("utf-8", "surrogateescape"), stdin)


def pct(info: NodeInfo, *words: str | bytes, stdin: bytes = b"", **options: Any) -> Done:
    """``pct`` on the node itself, without SSH."""
    done = subprocess.run(
        [str(info.pct), *words], input=stdin, capture_output=True, timeout=TIMEOUT_S, check=False, **options
    )
    return Done(done.returncode, done.stdout, done.stderr)


def with_asyncssh(info: NodeInfo, work: Callable[[asyncssh.SSHClientConnection], Any], **options: Any) -> Any:
    """Run the coroutine function ``work`` on a connection of asyncssh's own client."""

    async def connected() -> Any:
        login: dict[str, Any] = {"username": info.user, "client_keys": [str(info.client_key)]} | options
        async with asyncssh.connect(
            info.address, info.port, known_hosts=str(info.known_hosts), agent_path=None, config=None, **login
        ) as connection:
            return await work(connection)

    return asyncio.run(asyncio.wait_for(connected(), TIMEOUT_S))


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Wait until ``condition`` holds, and return what it returned."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{condition} did not come true within {timeout_s} s")


def is_alive(pid: int) -> bool:
    """Whether ``pid`` runs; its zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def number_in(path: Path) -> int:
    """The number that a process writes to ``path``, once it is there."""

    def read() -> str:
        try:
            text = path.read_text()
        except FileNotFoundError:
            return ""
        return text.strip() if text.endswith("\n") else ""

    return int(until(read))
