"""What a node's state folder is filled with: keys, launchers, containers. Making it a second time changes nothing."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import asyncssh

import orchestrator
from orchestrator.errors import UsageError
from orchestrator.localnode import layout
from orchestrator.localnode.inventory_file import ContainerPlan
from orchestrator.localnode.server import ADDRESS

_INTERPRETER_LINE_BYTES = 127  # BINPRM_BUF_SIZE - 1 of kernels before 5.1


def make_state_folder(state: Path) -> None:
    """The state folder alone. Raises :class:`UsageError` when it holds something and is no node's."""
    state.mkdir(parents=True, exist_ok=True)
    names = [path.name for path in state.iterdir()]
    if names and layout.NODE_LOCK not in names:
        raise UsageError(
            f"{state} is not a node's folder, and it is not empty.", "Name a new folder for the node."
        )


def make_folders(state: Path) -> None:
    """The folders in the state folder."""
    for name in (layout.HOME, layout.CONTAINERS, "etc", "bin", "lib", "run", "log"):
        (state / name).mkdir(exist_ok=True)
    # Whoever may enter could run commands through the containers' sockets.
    state.chmod(0o700)


def make_keys(state: Path) -> None:
    """The server's own key and the one client key that may log in, made once."""
    host_key, client_key = state / layout.HOST_KEY, state / layout.CLIENT_KEY
    for path, comment in ((host_key, "embedded node"), (client_key, "controller of the embedded node")):
        if not path.exists():
            key = asyncssh.generate_private_key("ssh-ed25519", comment=comment)
            write_atomically(path, key.export_private_key("openssh"), 0o600)
    public = asyncssh.read_private_key(str(client_key)).export_public_key("openssh")
    write_atomically(state / layout.AUTHORIZED_KEYS, public, 0o600)


def write_known_hosts(state: Path, port: int) -> None:
    public = (
        asyncssh.read_private_key(str(state / layout.HOST_KEY)).export_public_key("openssh").decode("ascii")
    )
    line = f"[{ADDRESS}]:{port} {' '.join(public.split()[:2])}\n"
    write_atomically(state / layout.KNOWN_HOSTS, line.encode("ascii"), 0o644)


def write_launchers(state: Path) -> None:
    """``bin/pct`` and ``lib/container-init``: Python scripts that know their state folder.

    They run under the base interpreter, isolated and without site-packages: that starts in a few milliseconds and
    does not depend on the desk's venv.
    """
    head = f"{_interpreter_line(base_python())}import sys\nsys.path.insert(0, {str(package_root())!r})\n"
    pct = (
        # Interrupted, it ends by the signal, without a traceback.
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        f"from orchestrator.localnode.pct import main\nsys.exit(main({str(state)!r}, sys.argv[1:]))\n"
    )
    container_init = (
        f"from orchestrator.localnode.init import main\nmain({str(state)!r}, sys.argv[1], int(sys.argv[2]))\n"
    )
    for name, body in ((layout.PCT, pct), (layout.CONTAINER_INIT, container_init)):
        write_atomically(state / name, (head + body).encode("utf-8"), 0o755)


def _interpreter_line(python: str) -> str:
    """``#!`` and the interpreter; where the kernel would not take its path, a line that is ``exec`` to a shell and a
    string to Python."""
    line = f"#!{python} -IS\n"
    if len(os.fsencode(line)) <= _INTERPRETER_LINE_BYTES and not any(letter.isspace() for letter in python):
        return line
    return f"#!/bin/sh\n'''exec' {shlex.quote(python)} -IS \"$0\" \"$@\"\n' '''\n"


def make_container(state: Path, container_id: str, plan: ContainerPlan) -> None:
    folder = Path(layout.container_folder(str(state), container_id))
    rootfs = folder / layout.ROOTFS
    for name in ("opt/dflash", "root", "tmp"):
        (rootfs / name).mkdir(parents=True, exist_ok=True)
    write_atomically(folder / layout.CONTAINER_INVENTORY, plan.encode(), 0o600)
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
    write_atomically(folder / layout.CONFIG, text.encode("utf-8"), 0o640)


def base_python() -> str:
    """The interpreter that the running one's venv is made from: an absolute path without symbolic links."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def package_root() -> Path:
    return Path(orchestrator.__file__).resolve().parent.parent


def write_atomically(path: Path, content: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, mode)
        file.write(content)
    temporary.replace(path)
