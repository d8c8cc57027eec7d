"""OpenSSH's own server on loopback: its own configuration, host key and port, and the one client key that it takes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.lxc import machine

ADDRESS = "127.0.0.1"
_START_TIMEOUT_S = 15.0
# MaxStartups, MaxSessions and the rest are OpenSSH's defaults, as on a Proxmox host.
_CONFIG = """\
ListenAddress {address}
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile {folder}/sshd.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM yes
UseDNS no
LogLevel VERBOSE
Subsystem sftp internal-sftp
"""


@dataclass(frozen=True)
class Sshd:
    """A server whose files are in ``folder``."""

    folder: Path
    port: int

    @property
    def client_key(self) -> Path:
        return self.folder / "client_key"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def log(self) -> Path:
        return self.folder / "sshd.log"

    @property
    def pid(self) -> int:
        return int((self.folder / "sshd.pid").read_text())

    @property
    def host_public_key(self) -> str:
        """Type and base64 of the host key, as known_hosts has them."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    def known_hosts_line(self, port: int | None = None) -> str:
        """What known_hosts says of this server, reached at ``port`` (default: its own)."""
        return f"[{ADDRESS}]:{port or self.port} {self.host_public_key}\n"

    def start(self) -> None:
        """Make keys unless they are there, and serve."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("host_key", "client_key"):
            if not (self.folder / name).exists():
                make_key(self.folder / name)
        (self.folder / "authorized_keys").write_text((self.folder / "client_key.pub").read_text())
        self.known_hosts.write_text(self.known_hosts_line())
        config = self.folder / "sshd_config"
        config.write_text(_CONFIG.format(address=ADDRESS, port=self.port, folder=self.folder))
        # sshd's privilege separation wants it, and a machine without an SSH service lacks it.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        server = machine.program("sshd")
        assert server is not None
        subprocess.run(
            [server, "-f", str(config), "-E", str(self.log)], check=True, timeout=30, stdin=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((ADDRESS, self.port), timeout=1):
                return
            time.sleep(0.05)
        raise RuntimeError(f"sshd does not answer; its log: {self.log.read_text()}")

    def stop(self) -> None:
        """End the server and every session of it."""
        pid_file = self.folder / "sshd.pid"
        if not pid_file.exists():
            return
        for pid in [*descendants(self.pid), self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pid_file.unlink()


def make_key(path: Path) -> None:
    """An ed25519 key pair at ``path`` and ``path``.pub, without a passphrase."""
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "bed", "-f", str(path)]
    subprocess.run(argv, check=True, timeout=30, stdin=subprocess.DEVNULL)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((ADDRESS, 0))
        return int(listener.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """The pids of every process below ``pid``, the deepest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found.append(child)
            waiting.append(child)
    return found[::-1]
