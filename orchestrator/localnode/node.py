"""Start, stop and describe the embedded node of a state folder.

``start`` leaves an SSH server running that outlives its caller, with at least one container, and writes what the
controller needs to reach it: a key, a known_hosts file and an inventory. Everything lives in the state folder, and
nothing outside of it is touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.container_id import is_container_id
from orchestrator.desk_account import own_path, user_name
from orchestrator.errors import RemoteError, UsageError
from orchestrator.localnode import containers, detach, layout, process, provision, server
from orchestrator.localnode.inventory_file import ContainerPlan, inventory_text
from orchestrator.localnode.server import ADDRESS, ServerOptions

DEFAULT_CONTAINER = "200"
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class NodeInfo:
    """How to reach a node, and what it has. Paths are absolute."""

    address: str
    port: int
    user: str
    client_key: Path
    known_hosts: Path
    pct: Path
    inventory: Path
    containers: tuple[str, ...]


def start(
    state_dir: Path,
    *,
    options: ServerOptions | None = None,
    plan: ContainerPlan | None = None,
    environment: Mapping[str, str] | None = None,
) -> NodeInfo:
    """Start the node in ``state_dir`` unless it runs, and wait until it accepts connections.

    A new node gets one container, :data:`DEFAULT_CONTAINER`; containers that exist are started. ``plan`` says what
    that first container is for. ``environment`` is where the desk's pip settings are read from (default: this
    process's). Starting a running node changes nothing but the inventory, which is written anew. Raises
    :class:`RemoteError` when the server does not come up, and :class:`UsageError` when the folder holds something
    that is no node.
    """
    state = _absolute(state_dir)
    environment = os.environ if environment is None else environment
    provision.make_state_folder(state)
    with _node_lock(state):
        provision.make_folders(state)
        provision.make_keys(state)
        provision.write_launchers(state)
        port = _running_port(state)
        if port is None:
            port = _launch_server(state, options or ServerOptions())
        provision.write_known_hosts(state, port)
        if not layout.container_ids(str(state)):
            provision.make_container(state, DEFAULT_CONTAINER, plan or ContainerPlan())
        for container_id in layout.container_ids(str(state)):
            _start_container(state, container_id)
        return _describe(state, port, environment)


def stop(state_dir: Path) -> bool:
    """Stop the node's containers and its server, with everything that runs in them; False when nothing ran.

    Raises :class:`RemoteError` when a process does not end.
    """
    state = _absolute(state_dir)
    if not (state / layout.NODE_LOCK).exists():
        return False
    with _node_lock(state):
        stopped = False
        for container_id in layout.container_ids(str(state)):
            stopped = _stop_container(state, container_id) or stopped
        return _stop_server(state) or stopped


def status(state_dir: Path) -> NodeInfo | None:
    """The running node of ``state_dir``; None when its server does not run."""
    state = _absolute(state_dir)
    port = _running_port(state)
    return None if port is None else _info(state, port)


def add_container(
    state_dir: Path,
    container_id: str,
    *,
    plan: ContainerPlan | None = None,
    environment: Mapping[str, str] | None = None,
) -> NodeInfo:
    """Add a container to the running node, start it, and write the inventory anew.

    Raises :class:`UsageError` for an id that is taken or is none, or when the node does not run.
    """
    state = _absolute(state_dir)
    if not is_container_id(container_id):
        raise UsageError(
            f"{container_id!r} is not a container id.", "Proxmox numbers containers from 100 on."
        )
    port = _running_port(state)
    if port is None:
        raise UsageError(f"No node runs in {state}.", "Start it first.")
    with _node_lock(state):
        if container_id in layout.container_ids(str(state)):
            raise UsageError(
                f"The node in {state} has a container {container_id} already.", "Choose another id."
            )
        provision.make_container(state, container_id, plan or ContainerPlan())
        _start_container(state, container_id)
        return _describe(state, port, os.environ if environment is None else environment)


def _absolute(state_dir: Path) -> Path:
    return own_path(state_dir).absolute()


@contextlib.contextmanager
def _node_lock(state: Path) -> Iterator[None]:
    fd = os.open(state / layout.NODE_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _launch_server(state: Path, options: ServerOptions) -> int:
    """Start the server detached; its port. Raises :class:`RemoteError`."""
    log = state / layout.SERVER_LOG
    program = [sys.executable, "-m", "orchestrator.localnode.server"]
    ready = detach.launch(
        [*program, str(state), server.encode_options(options), str(_last_port(state))],
        environment={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "HOME": str(state / layout.HOME),
            "PYTHONPATH": str(provision.package_root()),
        },
        cwd=str(state / layout.HOME),
        log=str(log),
    )
    if not ready:
        last = "".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:])
        raise RemoteError(
            f"The embedded node's SSH server did not start: {last or 'it said nothing'}.", f"Its log: {log}"
        )
    return int(ready)


def _last_port(state: Path) -> int:
    """The port of the known_hosts line; 0 when there is none."""
    try:
        return int((state / layout.KNOWN_HOSTS).read_text().split()[0].rpartition(":")[2])
    except (OSError, ValueError, IndexError):
        return 0


def _record(state: Path) -> tuple[process.Identity, int] | None:
    """Who the server is, or was, and its port."""
    try:
        raw = json.loads((state / layout.SERVER_RECORD).read_text())
        pid, start_time, boot = raw["process"]
        return (int(pid), int(start_time), str(boot)), int(raw["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _running_port(state: Path) -> int | None:
    record = _record(state)
    return record[1] if record is not None and process.is_running(record[0]) else None


def _stop_server(state: Path) -> bool:
    record = _record(state)
    if record is None or not process.is_running(record[0]):
        (state / layout.SERVER_RECORD).unlink(missing_ok=True)
        return False
    who, _ = record
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(who[0], number)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            if not process.is_running(who):
                (state / layout.SERVER_RECORD).unlink(missing_ok=True)
                return True
            time.sleep(0.02)
    raise RemoteError(f"The embedded node's server, process {who[0]}, did not end.", "Look at what holds it.")


def _start_container(state: Path, container_id: str) -> None:
    try:
        with containers.Lock(str(state), container_id):
            if containers.why_stopped(str(state), container_id):
                containers.start(str(state), container_id)
    except containers.Die as died:
        raise RemoteError(f"Container {container_id} of the node in {state} did not start: {died}.") from None


def _stop_container(state: Path, container_id: str) -> bool:
    try:
        with containers.Lock(str(state), container_id):
            if containers.why_stopped(str(state), container_id):
                return False
            containers.stop(str(state), container_id)
            return True
    except containers.Die as died:
        raise RemoteError(f"Container {container_id} of the node in {state} did not stop: {died}.") from None


def _describe(state: Path, port: int, environment: Mapping[str, str]) -> NodeInfo:
    info = _info(state, port)
    text = inventory_text(
        state,
        address=info.address,
        port=info.port,
        user=info.user,
        default_python=provision.base_python(),
        environment=environment,
    )
    # Index URLs may hold passwords, so nobody else may read it.
    provision.write_atomically(info.inventory, text.encode("utf-8"), 0o600)
    return info


def _info(state: Path, port: int) -> NodeInfo:
    return NodeInfo(
        address=ADDRESS,
        port=port,
        user=user_name(),
        client_key=state / layout.CLIENT_KEY,
        known_hosts=state / layout.KNOWN_HOSTS,
        pct=state / layout.PCT,
        inventory=state / layout.INVENTORY,
        containers=tuple(layout.container_ids(str(state))),
    )
