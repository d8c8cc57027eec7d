"""What the container offers: its init system and its GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import List, Optional, Set

from payload.agent.protocol import Json

_GPU_FIELDS = {
    "index": "index",
    "name": "name",
    "uuid": "uuid",
    "driver": "driver_version",
    "memory_total_mib": "memory.total",
    "memory_used_mib": "memory.used",
    "utilization_percent": "utilization.gpu",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
}
_NUMBERS = {"index", "memory_total_mib", "memory_used_mib", "utilization_percent", "temperature_c", "power_w"}
# A driver that hangs must not hang the agent.
_NVIDIA_SMI_TIMEOUT_S = 5.0


def has_systemd() -> bool:
    """Whether this container's own systemd is process 1 and can start units.

    A folder that only stands in for a container sees the machine's systemd, whose units would outlive it: systemd
    writes ``/run/systemd/container`` where it runs in a container.
    """
    try:
        first = Path("/proc/1/comm").read_text().strip()
    except OSError:
        return False
    booted = first == "systemd" and Path("/run/systemd/system").is_dir()
    return booted and Path("/run/systemd/container").is_file() and bool(program("systemd-run"))


def program(name: str) -> Optional[str]:
    """The path of a program on PATH, or None."""
    paths = (Path(folder, name) for folder in os.environ.get("PATH", os.defpath).split(os.pathsep))
    return next((str(path) for path in paths if path.is_file() and os.access(path, os.X_OK)), None)


def gpus() -> Optional[List[Json]]:
    """One entry for each GPU that nvidia-smi shows: empty without nvidia-smi, None when it does not answer."""
    if program("nvidia-smi") is None:
        return []
    output = _nvidia_smi(f"--query-gpu={','.join(_GPU_FIELDS.values())}")
    if output is None:
        return None
    import csv

    found = []
    for row in csv.reader(output.splitlines(), skipinitialspace=True):
        if len(row) == len(_GPU_FIELDS):
            texts = dict(zip(_GPU_FIELDS, row))  # noqa: B905 - the lengths are equal, and Python 3.9 has no strict
            found.append({name: _value(name, text) for name, text in texts.items()})
    return found


def gpu_holders() -> Set[int]:
    """The pids that hold a GPU, of those that nvidia-smi can name in this container."""
    output = _nvidia_smi("--query-compute-apps=pid")
    return {int(line) for line in (output or "").split() if line.isdigit()}


def _value(name: str, text: str) -> Optional[object]:
    if name not in _NUMBERS:
        return text
    try:
        return int(text) if name == "index" else float(text)
    except ValueError:
        # nvidia-smi writes "[N/A]" where a GPU does not tell.
        return None


def _nvidia_smi(query: str) -> Optional[str]:
    path = program("nvidia-smi")
    if path is None:
        return None
    # Imported where there is something to run: it would take a sixth of a short verb's time.
    import subprocess

    try:
        process = subprocess.Popen(
            [path, query, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        output = process.communicate(timeout=_NVIDIA_SMI_TIMEOUT_S)[0]
    except OSError:
        return None
    except subprocess.TimeoutExpired:
        # Not waited for: in a hanging driver it does not even die.
        process.kill()
        return None
    return output.decode("utf-8", "replace") if process.returncode == 0 else None
