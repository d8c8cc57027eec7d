"""One LXC container in which systemd runs, and what only the machine that carries it can do to it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lxc import rootfs

BOOT_TIMEOUT_S = 60.0
_TOOL_TIMEOUT_S = 60.0
_CONFIG = """\
lxc.uts.name = ct{container_id}
lxc.rootfs.path = {rootfs}
lxc.apparmor.profile = unconfined
lxc.mount.auto = proc:mixed sys:mixed cgroup:mixed
lxc.cap.drop = mac_admin mac_override sys_time sys_module sys_rawio
lxc.tty.max = 0
lxc.pty.max = 64
lxc.signal.halt = SIGRTMIN+3
lxc.log.file = {folder}/lxc.log
lxc.log.level = WARN
"""
_PRIVILEGED = "lxc.net.0.type = none\n"
# sysfs can be mounted only by who owns the network namespace.
_UNPRIVILEGED = "lxc.net.0.type = empty\nlxc.idmap = u 0 100000 65536\nlxc.idmap = g 0 100000 65536\n"


@dataclass(frozen=True)
class Lxc:
    """The container ``container_id`` of the LXC folder ``store``."""

    store: Path
    container_id: str

    @property
    def folder(self) -> Path:
        return self.store / self.container_id

    @property
    def root(self) -> Path:
        """The running container's root as the machine sees it, with what is mounted there."""
        return Path(f"/proc/{self._init_pid()}/root")

    @property
    def pct_conf(self) -> Path:
        """What ``pct config`` shows: ``key: value`` lines."""
        return self.folder / "pct.conf"

    def make(self, *, unprivileged: bool = False) -> None:
        """Lay the container's folder; it is not started.

        A privileged container shares the machine's network, so that it reaches whatever the machine reaches; an
        unprivileged one has only loopback.
        """
        # The container's own root must reach its root file system.
        self.folder.mkdir(parents=True, mode=0o755)
        path = rootfs.lay_unprivileged(self.folder) if unprivileged else rootfs.lay(self.folder)
        text = _CONFIG.format(container_id=self.container_id, rootfs=path, folder=self.folder)
        (self.folder / "config").write_text(text + (_UNPRIVILEGED if unprivileged else _PRIVILEGED))
        self.set_pct_conf(
            arch="amd64",
            cores="2",
            features="nesting=1",
            hostname=f"ct{self.container_id}",
            memory="4096",
            ostype="debian",
            rootfs=f"local:{self.container_id}/vm-{self.container_id}-disk-0.raw,size=8G",
            swap="0",
            unprivileged="1" if unprivileged else "0",
        )

    def set_pct_conf(self, **pairs: str) -> None:
        self.pct_conf.write_text("".join(f"{key}: {value}\n" for key, value in sorted(pairs.items())))

    def start(self) -> None:
        """Start it and wait until its systemd says ``running``."""
        self._tool("lxc-start", "-d")
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        said = ""
        while time.monotonic() < deadline:
            done = self.run(["systemctl", "is-system-running"], check=False)
            said = (done.stdout + done.stderr).strip()
            if done.stdout.strip() in ("running", "degraded"):
                break
            time.sleep(0.1)
        if not said.startswith("running"):
            failed = self.run(["systemctl", "--failed", "--no-legend", "--plain"], check=False).stdout
            raise RuntimeError(f"container {self.container_id} did not boot to `running`: {said}\n{failed}")

    def kill(self) -> None:
        """End every process of it at once, as a power cut would."""
        self._tool("lxc-stop", "-k", check=False)

    def restart(self) -> None:
        self.kill()
        self.start()

    def freeze(self) -> None:
        self._tool("lxc-freeze")

    def unfreeze(self) -> None:
        self._tool("lxc-unfreeze")

    def run(
        self, argv: Sequence[str], *, check: bool = True, timeout_s: float = _TOOL_TIMEOUT_S, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` in the container as its root."""
        return subprocess.run(
            self.command(argv),
            input=stdin,
            capture_output=True,
            text=True,
            check=check,
            timeout=timeout_s,
        )

    def command(self, argv: Sequence[str]) -> list[str]:
        """What the machine runs so that the container's root runs ``argv``."""
        return [*self._command("lxc-attach"), "--clear-env", "--", *argv]

    def pids(self, words: str) -> list[int]:
        """The pids, as the container counts them, of processes whose command line holds ``words``."""
        program = (
            "import os, pathlib, sys\n"
            "for entry in pathlib.Path('/proc').glob('[0-9]*'):\n"
            "    try:\n"
            "        line = (entry / 'cmdline').read_bytes().replace(bytes(1), b' ')\n"
            "    except OSError:\n"
            "        continue\n"
            "    if int(entry.name) != os.getpid() and sys.argv[1].encode() in line:\n"
            "        print(entry.name)\n"
        )
        return [int(pid) for pid in self.run(["python3", "-c", program, words]).stdout.split()]

    def is_alive(self, pid: int) -> bool:
        """Whether the container's process ``pid`` runs; its zombie does not."""
        done = self.run(["cat", f"/proc/{pid}/stat"], check=False)
        return done.returncode == 0 and done.stdout.rpartition(")")[2].split()[0] not in "ZX"

    def run_as_pid(self, pid: int, argv: Sequence[str]) -> int:
        """Start ``argv`` in the container and leave it running, as process ``pid`` if that is free; returns its pid."""
        # The next process of a pid namespace gets the number after the last one.
        program = 'echo "$1" > /proc/sys/kernel/ns_last_pid; shift; "$@" </dev/null >/dev/null 2>&1 & echo $!'
        init = str(self._init_pid())
        enter = ["nsenter", "--target", init, "--mount", "--uts", "--ipc", "--", *argv]
        done = subprocess.run(
            ["nsenter", "--target", init, "--pid", "--", "sh", "-c", program, "sh", str(pid - 1), *enter],
            capture_output=True,
            text=True,
            check=True,
            timeout=_TOOL_TIMEOUT_S,
        )
        return int(done.stdout)

    def _init_pid(self) -> int:
        """The machine's pid of the container's process 1."""
        argv = [*self._command("lxc-info"), "-p", "-H"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=_TOOL_TIMEOUT_S)
        return int(done.stdout)

    def _tool(self, name: str, *arguments: str, check: bool = True) -> None:
        done = subprocess.run(
            [*self._command(name), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TOOL_TIMEOUT_S,
            check=False,
        )
        if check and done.returncode != 0:
            log = self.folder / "lxc.log"
            why = "\n".join(log.read_text().splitlines()[-5:]) if log.exists() else done.stderr.strip()
            raise RuntimeError(f"{name} of container {self.container_id} failed:\n{why}")

    def _command(self, name: str) -> list[str]:
        return [name, "-P", str(self.store), "-n", self.container_id]
