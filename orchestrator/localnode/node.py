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
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import asyncssh

import orchestrator
from orchestrator.errors import RemoteError, UsageError
from orchestrator.localnode import containers, layout, process, server
from orchestrator.localnode.inventory_file import ContainerPlan, inventory_text
from orchestrator.localnode.server import ADDRESS, ServerOptions

DEFAULT_CONTAINER = "200"
START_TIMEOUT_S = 30.0
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
    :class:`RemoteError` when the server does not come up.
    """
    state = _absolute(state_dir)
    environment = os.environ if environment is None else environment
    _make_folders(state)
    with _node_lock(state):
        _make_keys(state)
        _write_launchers(state)
        port = _running_port(state)
        if port is None:
            port = _launch_server(state, options or ServerOptions())
        _write_known_hosts(state, port)
        if not layout.container_ids(str(state)):
            _make_container(state, DEFAULT_CONTAINER, plan or ContainerPlan())
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
    if not (container_id.isascii() and container_id.isdigit() and 3 <= len(container_id) <= 9):
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
        _make_container(state, container_id, plan or ContainerPlan())
        _start_container(state, container_id)
        return _describe(state, port, os.environ if environment is None else environment)


def _absolute(state_dir: Path) -> Path:
    return state_dir.expanduser().absolute()


def _make_folders(state: Path) -> None:
    for name in (layout.HOME, layout.CONTAINERS, "etc", "bin", "lib", "run", "log"):
        (state / name).mkdir(parents=True, exist_ok=True)
    # Whoever may enter could run commands through the containers' sockets.
    state.chmod(0o700)


@contextlib.contextmanager
def _node_lock(state: Path) -> Iterator[None]:
    fd = os.open(state / layout.NODE_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _make_keys(state: Path) -> None:
    """The server's own key and the one client key that may log in, made once."""
    host_key, client_key = state / layout.HOST_KEY, state / layout.CLIENT_KEY
    for path, comment in ((host_key, "embedded node"), (client_key, "controller of the embedded node")):
        if not path.exists():
            key = asyncssh.generate_private_key("ssh-ed25519", comment=comment)
            _write_atomically(path, key.export_private_key("openssh"), 0o600)
    public = asyncssh.read_private_key(str(client_key)).export_public_key("openssh")
    _write_atomically(state / layout.AUTHORIZED_KEYS, public, 0o600)


def _write_known_hosts(state: Path, port: int) -> None:
    public = (
        asyncssh.read_private_key(str(state / layout.HOST_KEY)).export_public_key("openssh").decode("ascii")
    )
    line = f"[{ADDRESS}]:{port} {' '.join(public.split()[:2])}\n"
    _write_atomically(state / layout.KNOWN_HOSTS, line.encode("ascii"), 0o644)


def _write_launchers(state: Path) -> None:
    """``bin/pct`` and ``lib/container-init``: Python scripts that know their state folder.

    They run under the base interpreter, isolated and without site-packages: that starts in a few milliseconds and
    does not depend on the desk's venv. The interpreter is named by ``exec`` in a line that is a string to Python,
    since a ``#!`` line takes no spaces and not more than 127 bytes.
    """
    head = (
        "#!/bin/sh\n"
        f"'''exec' {shlex.quote(base_python())} -I -S \"$0\" \"$@\"\n"
        "' '''\n"
        "import sys\n"
        f"sys.path.insert(0, {str(_package_root())!r})\n"
    )
    pct = f"from orchestrator.localnode.pct import main\nsys.exit(main({str(state)!r}, sys.argv[1:]))\n"
    container_init = (
        f"from orchestrator.localnode.init import main\nmain({str(state)!r}, sys.argv[1], int(sys.argv[2]))\n"
    )
    for name, body in ((layout.PCT, pct), (layout.CONTAINER_INIT, container_init)):
        _write_atomically(state / name, (head + body).encode("utf-8"), 0o755)


def base_python() -> str:
    """The interpreter that the running one's venv is made from: an absolute path without symbolic links."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _package_root() -> Path:
    return Path(orchestrator.__file__).resolve().parent.parent


def _launch_server(state: Path, options: ServerOptions) -> int:
    """Start the server detached; its port. Raises :class:`RemoteError`."""
    log_path = state / layout.SERVER_LOG
    ready_read, ready_write = os.pipe()
    try:
        with log_path.open("ab") as log:
            launched = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "orchestrator.localnode.server",
                    str(state),
                    server.encode_options(options),
                    str(_last_port(state)),
                    str(ready_write),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=state / layout.HOME,
                env={
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "LANG": "C.UTF-8",
                    "HOME": str(state / layout.HOME),
                    "PYTHONPATH": str(_package_root()),
                },
                start_new_session=True,
                pass_fds=(ready_write,),
            )
        os.close(ready_write)
        launched.wait(START_TIMEOUT_S)
        readable, _, _ = select.select([ready_read], [], [], START_TIMEOUT_S)
        line = os.read(ready_read, 16) if readable else b""
    finally:
        os.close(ready_read)
    if not line:
        last = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
        raise RemoteError(
            f"The embedded node's SSH server did not start: {''.join(last) or 'it said nothing'}.",
            f"Its log: {log_path}",
        )
    return int(line)


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


def _make_container(state: Path, container_id: str, plan: ContainerPlan) -> None:
    folder = Path(layout.container_folder(str(state), container_id))
    rootfs = folder / layout.ROOTFS
    for name in ("opt/dflash", "root", "tmp"):
        (rootfs / name).mkdir(parents=True, exist_ok=True)
    _write_atomically(folder / layout.CONTAINER_INVENTORY, plan.encode(), 0o600)
    config = {
        "arch": os.uname().machine.replace("x86_64", "amd64").replace("aarch64", "arm64"),
        "cores": str(os.cpu_count() or 1),
        "hostname": f"node-ct{container_id}",
        "memory": str(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20),
        "onboot": "1",
        "ostype": "unmanaged",
        "rootfs": str(rootfs),
        "swap": "0",
        "unprivileged": "1",
    }
    # The configuration makes the folder a container, so it comes last.
    text = "".join(f"{key}: {value}\n" for key, value in config.items())
    _write_atomically(folder / layout.CONFIG, text.encode("utf-8"), 0o640)


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
        default_python=base_python(),
        environment=environment,
    )
    # Index URLs may hold passwords, so nobody else may read it.
    _write_atomically(info.inventory, text.encode("utf-8"), 0o600)
    return info


def _info(state: Path, port: int) -> NodeInfo:
    return NodeInfo(
        address=ADDRESS,
        port=port,
        user=server.user_name(),
        client_key=state / layout.CLIENT_KEY,
        known_hosts=state / layout.KNOWN_HOSTS,
        pct=state / layout.PCT,
        inventory=state / layout.INVENTORY,
        containers=tuple(layout.container_ids(str(state))),
    )


def _write_atomically(path: Path, content: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, mode)
        file.write(content)
    temporary.replace(path)
