"""Whether this machine can carry the bed, asked once and answered in one sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

PACKAGES = {
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "lxc-start": "lxc",
    "debootstrap": "debootstrap",
    "newuidmap": "uidmap",
    "tar": "tar",
}
"""Program -> the Debian package that brings it."""
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def program(name: str) -> str | None:
    """The path of a program, also when it is one that only root has on its PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SBIN}")


def missing() -> str | None:
    """What a person can mend: root, and packages. None when nothing is missing."""
    if os.geteuid() != 0:
        return "the bed needs root: containers, mounts and an SSH server of its own"
    packages = sorted({package for name, package in PACKAGES.items() if program(name) is None})
    return f"the bed needs: apt-get install {' '.join(packages)}" if packages else None


def cannot() -> str | None:
    """Why no LXC container can run here although all is installed. None when it can.

    Two rights decide: to mount in a mount namespace of one's own, and to make a control group.
    """
    mounted = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "proc", "proc", "/proc"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    if mounted.returncode != 0:
        return f"this machine does not let root mount in namespaces of its own: {mounted.stderr.strip()}"
    trial = _cgroup_root() / f"dflash-bed-{os.getpid()}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        return f"this machine does not let root make control groups: {error}"
    return None


def _cgroup_root() -> Path:
    """The top of the hierarchy that systemd uses: the only one (v2), or the one of its name (v1)."""
    top = Path("/sys/fs/cgroup")
    return top if (top / "cgroup.procs").exists() else top / "systemd"
