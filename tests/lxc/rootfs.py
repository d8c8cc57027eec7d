"""The container's root file system: Debian by debootstrap, once, kept outside the repository.

``python -m tests.lxc.rootfs`` makes it, so that no test waits for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.lxc import machine

PACKAGES = ("systemd", "systemd-sysv", "dbus", "python3", "python3-dev", "g++", "ca-certificates", "procps")
"""What a container needs to run systemd, the agent, and torch's compiler."""
# The container shares the machine's network and kernel: it must set nothing there.
_MASKED_UNITS = ("systemd-sysctl.service", "systemd-modules-load.service")
_ID_SHIFT = 100_000
_NOT_COPIED = (
    "usr/lib/gcc",
    "usr/include",
    "usr/share/doc",
    "usr/share/locale",
    "usr/share/man",
    "var/lib/apt",
)
_DEBOOTSTRAP_TIMEOUT_S = 900.0
_COPY_TIMEOUT_S = 300.0


def base() -> Path:
    """The folder of the root file system that every container begins with, made by debootstrap unless it is there.

    It lies in ``$DFLASH_BED_CACHE``, else in ``$XDG_CACHE_HOME/dflash-bed`` (``~/.cache``), under a name that changes
    with what is in it, and nothing writes to it.
    """
    suite = _codename()
    name = hashlib.sha256(" ".join((suite, *PACKAGES)).encode()).hexdigest()[:12]
    path = cache_folder() / f"{suite}-{name}"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="debootstrap-", dir=path.parent) as folder:
        root = Path(folder) / "rootfs"
        packages = f"--include={','.join(PACKAGES)}"
        _run(
            ["debootstrap", "--variant=minbase", packages, suite, str(root), _mirror(suite)],
            _DEBOOTSTRAP_TIMEOUT_S,
        )
        shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
        for unit in _MASKED_UNITS:
            (root / "etc/systemd/system" / unit).symlink_to("/dev/null")
        # Each container gets an id of its own at its first boot.
        (root / "etc/machine-id").write_text("")
        with contextlib.suppress(FileExistsError):
            root.rename(path)
    return path


def lay(folder: Path) -> str:
    """A root file system over the base, whose changes are in ``folder``; returns its ``lxc.rootfs.path``."""
    changes = folder / "changes"
    (changes / "etc").mkdir(parents=True)
    _share_network_names(changes)
    return f"overlay:{base()}:{changes}"


def lay_unprivileged(folder: Path) -> str:
    """A root file system of its own in ``folder``, owned by the shifted ids; returns its ``lxc.rootfs.path``.

    It has no compiler, which would be most of the copy.
    """
    root = folder / "rootfs"
    root.mkdir()
    excluded = [f"--exclude=./{name}" for name in _NOT_COPIED]
    with subprocess.Popen(
        ["tar", "--create", "--directory", str(base()), *excluded, "."], stdout=subprocess.PIPE
    ) as packing:
        subprocess.run(
            ["tar", "--extract", "--same-owner", "--directory", str(root)],
            stdin=packing.stdout,
            check=True,
            timeout=_COPY_TIMEOUT_S,
        )
    _share_network_names(root)
    _allow_shifted_ids()
    _shift(root)
    return f"dir:{root}"


def _share_network_names(root: Path) -> None:
    for name in ("resolv.conf", "hosts"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)


def _allow_shifted_ids() -> None:
    """Let root map these ids, as Proxmox's own installation does. The two lines stay."""
    for path in (Path("/etc/subuid"), Path("/etc/subgid")):
        line = f"root:{_ID_SHIFT}:65536\n"
        if line not in (path.read_text() if path.exists() else ""):
            with path.open("a") as file:
                file.write(line)


def _shift(folder: Path) -> None:
    """Move every owner and group by 100000, as Proxmox maps an unprivileged container's."""
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            _shift_one(path)
    _shift_one(folder)


def _shift_one(path: Path) -> None:
    status = path.lstat()
    os.chown(path, status.st_uid + _ID_SHIFT, status.st_gid + _ID_SHIFT, follow_symlinks=False)
    if not path.is_symlink():
        # chown(2) takes set-user-id bits away.
        path.chmod(status.st_mode & 0o7777)


def _codename() -> str:
    with Path("/etc/os-release").open(encoding="utf-8") as file:
        facts = dict(line.rstrip("\n").split("=", 1) for line in file if "=" in line)
    return facts["VERSION_CODENAME"].strip('"')


def _mirror(suite: str) -> str:
    """The archive that this machine's own apt takes ``suite`` from."""
    listed = subprocess.run(
        [
            "apt-get",
            "indextargets",
            "--format",
            "$(CODENAME) $(RELEASE) $(COMPONENT) $(REPO_URI)",
            "Created-By: Packages",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    for line in listed.splitlines():
        codename, release, component, uri = line.split()
        if suite in (codename, release) and component == "main":
            return uri
    raise RuntimeError(f"apt knows no archive of {suite}: run apt-get update")


def cache_folder() -> Path:
    """Where things lie that are made once."""
    if given := os.environ.get("DFLASH_BED_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dflash-bed"


def _run(argv: list[str], timeout_s: float) -> None:
    path = machine.program(argv[0]) or argv[0]
    environment = {
        **os.environ,
        "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin",
        "LC_ALL": "C.UTF-8",
    }
    done = subprocess.run(
        [path, *argv[1:]], capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-2000:]
        raise RuntimeError(f"{argv[0]} ended with {done.returncode}:\n{said}")


if __name__ == "__main__":
    if problem := machine.missing():
        sys.exit(problem)
    base()
