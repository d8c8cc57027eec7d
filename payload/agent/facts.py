"""Verb ``facts``: what this container is, for whoever decides whether a run can start here.

Only what is seen; what it means is judged at the desk (``orchestrator/checks/``).
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import List, Optional

from payload.agent import state
from payload.agent.holders import gpu_processes, port
from payload.agent.layout import Layout, active_name
from payload.agent.processes import boot_id
from payload.agent.protocol import Events, Json, Request
from payload.agent.status import disk
from payload.agent.system import gpu_holders, gpus, has_systemd
from payload.errors import PayloadError

_COMPILER_TIMEOUT_S = 10.0


def facts(request: Request, events: Events) -> Json:
    """Verb: facts as they are found; null where something cannot be told.

    Needs no root and changes nothing but the state of a run whose supervisor is found to be gone. ``gpus`` is null when
    nvidia-smi is there and does not answer. The field ``port`` of the request names a TCP port to try to listen on, by
    default a free one; ``paths``, paths as a recipe names them, of which each is told what it is.
    """
    layout = Layout.at(request.root)
    root = layout.root
    while not root.exists():
        root = root.parent
    found_gpus = gpus()
    holders = sorted(gpu_holders()) if found_gpus else []
    return {
        "release": active_name(layout.current),
        "venv": active_name(layout.venv_link),
        "python": {"version": platform.python_version(), "path": sys.executable},
        "python_h": str(_python_h()) if _python_h().is_file() else None,
        "compilers": {name: _version_line(name) for name in ("gcc", "g++", "cc", "clang")},
        "disk": disk(root),
        "inodes_free": _inodes_free(root),
        "writable": os.access(root, os.W_OK),
        "shm": disk(Path("/dev/shm")),
        "memory": _memory(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": found_gpus,
        "nvidia_smi": shutil.which("nvidia-smi"),
        "gpu_holders": holders,
        "gpu_processes": gpu_processes(holders),
        "runs": _going_on(layout),
        "paths": {name: _described(layout, name) for name in _names(request)},
        "nvidia_nodes": _nvidia_nodes(),
        "driver": _driver(),
        "boot_id": boot_id(),
        "systemd": has_systemd(),
        "init": _init(),
        "port": port(request.get("port", int) or 0),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": list(platform.libc_ver()),
        "distribution": _distribution(),
        "uid": os.getuid(),
        "time": time.time(),
    }


def _going_on(layout: Layout) -> List[Json]:
    """The runs that may have processes at work, with their state: a lost one has it where some are left of it."""
    found = []
    for run_id in state.run_ids(layout):
        # One whose folder is damaged is `status`'s to tell of.
        with contextlib.suppress(OSError, PayloadError):
            run = state.current(layout, run_id)
            if run.state in state.ACTIVE or state.left_behind(layout, run):
                found.append({"run_id": run_id, "state": run.state})
    return found


def _names(request: Request) -> List[str]:
    return [name for name in request.get("paths", list) or [] if isinstance(name, str)]


def _described(layout: Layout, name: str) -> Json:
    """``path``, where the recipe's ``name`` leads (the rule is that of payload/places.py); ``kind``: ``file``,
    ``folder`` or ``other``, null when nothing is there; ``bytes`` of a file."""
    found: Json = {"path": name, "kind": None, "bytes": None}
    # A home that is not known, a name that no file can have.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        path = layout.root / Path(name).expanduser()
        found["path"] = str(path)
        status = path.stat()
        is_file = stat.S_ISREG(status.st_mode)
        found["kind"] = "file" if is_file else "folder" if stat.S_ISDIR(status.st_mode) else "other"
        found["bytes"] = status.st_size if is_file else None
    return found


def _init() -> Optional[Json]:
    """The name of process 1, and the container manager that started it, where systemd says so."""
    with contextlib.suppress(OSError):
        manager = Path("/run/systemd/container")
        name = Path("/proc/1/comm").read_text().strip()
        return {"name": name, "container": manager.read_text().strip() if manager.is_file() else None}
    return None


def _inodes_free(folder: Path) -> Optional[int]:
    """How many more files the file system takes; None where it has no fixed number."""
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return found.f_favail if found.f_files else None
    return None


def _python_h() -> Path:
    return Path(sysconfig.get_paths()["include"]) / "Python.h"


def _version_line(program: str) -> Optional[str]:
    path = shutil.which(program)
    if path is None:
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_COMPILER_TIMEOUT_S,
            check=True,
        )
        lines = done.stdout.decode("utf-8", "replace").splitlines()
        return lines[0] if lines else None
    return None


def _memory() -> Json:
    """Bytes of memory: the machine's, and the container's limit (cgroup v2) where there is one."""
    found: Json = {"total_bytes": None, "available_bytes": None, "limit_bytes": None}
    with contextlib.suppress(OSError):
        text = Path("/proc/meminfo").read_text()
        for name, key in (("MemTotal", "total_bytes"), ("MemAvailable", "available_bytes")):
            line = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
            if line:
                found[key] = int(line.group(1)) * 1024
    with contextlib.suppress(OSError, ValueError):
        found["limit_bytes"] = int(Path("/sys/fs/cgroup/memory.max").read_text())
    return found


def _nvidia_nodes() -> List[Json]:
    """Every /dev/nvidia* node: its device number, and whether this user may open it."""
    nodes = []
    for path in sorted([*Path("/dev").glob("nvidia*"), *Path("/dev").glob("nvidia-caps/*")]):
        with contextlib.suppress(OSError):
            status = path.stat()
            if stat.S_ISCHR(status.st_mode):
                device = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
                usable = os.access(path, os.R_OK | os.W_OK)
                nodes.append({"path": str(path), "device": device, "usable": usable})
    return nodes


def _driver() -> Optional[str]:
    """The version of the loaded NVIDIA kernel driver, or None."""
    with contextlib.suppress(OSError):
        found = re.search(
            r"Module\S*\s+.*?(\d+\.\d+(?:\.\d+)?)", Path("/proc/driver/nvidia/version").read_text()
        )
        return found.group(1) if found else None
    return None


def _distribution() -> Optional[str]:
    with contextlib.suppress(OSError):
        found = re.search(r'^PRETTY_NAME="?([^"\n]*)', Path("/etc/os-release").read_text(), re.MULTILINE)
        return found.group(1) if found else None
    return None
