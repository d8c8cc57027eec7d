"""Checks of the GPUs: their number, their nodes, the driver, who holds them, and a real CUDA init."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.checks.model import (
    Finding,
    Needs,
    Seen,
    Severity,
    going_on,
    mappings,
    named,
    number,
    pid,
    text,
)

MINIMUM_DRIVER: dict[int, tuple[int, ...]] = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
"""The oldest Linux driver for each major version of CUDA: NVIDIA's CUDA Toolkit release notes, "CUDA Toolkit and
Minimum Required Driver Version for CUDA Minor Version Compatibility"."""

IDLE_MEMORY_MIB = 1024.0
"""An idle GPU's driver holds up to some hundred MiB."""
HELD_SHARE = 0.1


def gpus(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether nvidia-smi shows every GPU that the run uses."""
    if not needs.gpus:
        yield Finding("gpus", "ok", f"recipe {needs.recipe} asks for none here")
        return
    why = f"recipe {needs.recipe} runs {needs.ranks} ranks, each on a GPU of its own"
    found = seen.facts.get("gpus")
    if found is None:
        yield Finding(
            "gpus",
            "error",
            "nvidia-smi does not answer",
            why,
            f"run it by hand: pct exec {needs.container_id} -- nvidia-smi   (a version mismatch: install the "
            "host's driver version in the container, without its kernel module: --no-kernel-module)",
        )
        return
    if not text(seen.facts.get("nvidia_smi")) and not mappings(found):
        yield Finding(
            "gpus",
            "error",
            f"no nvidia-smi in the container, {len(needs.gpus)} GPUs are needed",
            why,
            "install the host's driver version in the container, without its kernel module: "
            "sh NVIDIA-Linux-*.run --no-kernel-module",
        )
        return
    there = {index for gpu in mappings(found) if (index := number(gpu.get("index"))) is not None}
    missing = [gpu for gpu in needs.gpus if gpu not in there]
    if missing:
        cards = [f"/dev/nvidia{gpu}" for gpu in missing]
        yield Finding(
            "gpus",
            "error",
            f"GPU {_list(missing)} missing; there are {len(there)}, {len(needs.gpus)} are needed",
            why,
            f"pass them in, on the host: pct set {needs.container_id} {_devices(seen, cards)}; or choose a recipe, "
            "or targets and drafters in the inventory, for the GPUs that are there",
        )
    else:
        names = sorted({text(gpu.get("name")) for gpu in mappings(found)} - {""})
        yield Finding(
            "gpus", "ok", f"{len(there)} ({', '.join(names) or 'no name'}), {len(needs.gpus)} needed"
        )


def nodes(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether every device node of the driver is there and may be opened."""
    if not needs.gpus:
        return
    found = {text(node.get("path")): node for node in mappings(seen.facts.get("nvidia_nodes"))}
    cards = [path for path in found if re.fullmatch(r"/dev/nvidia\d+", path)]
    missing = [path for path in ("/dev/nvidiactl", "/dev/nvidia-uvm") if path not in found]
    if len(cards) < len(needs.gpus):
        missing += [path for gpu in needs.gpus if (path := f"/dev/nvidia{gpu}") not in found]
    closed = sorted(path for path, node in found.items() if node.get("usable") is False and _matters(path))
    if missing:
        yield Finding(
            "nodes",
            "error",
            f"missing: {', '.join(missing)}",
            "CUDA opens each of them; after a boot of the host, nvidia-uvm is there only once something used it",
            "on the host: nvidia-modprobe -u -c 0 && nvidia-smi; then "
            f"pct set {needs.container_id} {_devices(seen, missing)} && pct reboot {needs.container_id}",
        )
    elif closed:
        yield Finding(
            "nodes",
            "error",
            f"not to be opened: {', '.join(closed)}",
            "the node is there, and its mode or the container's device rules forbid it",
            f"on the host, in /etc/pve/lxc/{needs.container_id}.conf: devN: {closed[0]},mode=0666",
        )
    else:
        yield Finding("nodes", "ok", f"nvidiactl, nvidia-uvm and {len(cards)} GPUs")


def driver(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether the driver is new enough for the CUDA of the pinned torch."""
    if not needs.gpus:
        return
    version = text(seen.facts.get("driver")) or next(
        (text(gpu.get("driver")) for gpu in mappings(seen.facts.get("gpus"))), ""
    )
    have = _version(version)
    if not have:
        yield Finding(
            "driver",
            "error",
            "no NVIDIA kernel driver is loaded",
            "the container uses the host's",
            "on the host: modprobe nvidia && nvidia-smi   (missing: install the driver for the host's kernel)",
        )
        return
    major = int(needs.cuda.split(".")[0]) if needs.cuda and needs.cuda.split(".")[0].isdigit() else None
    least = MINIMUM_DRIVER.get(major) if major is not None else None
    if least is not None and have < least:
        # The newest build that this driver still runs.
        fitting = max((known for known, needed in MINIMUM_DRIVER.items() if have >= needed), default=None)
        other = f", or pin a build for CUDA {fitting} (torch.backend in the inventory)" if fitting else ""
        yield Finding(
            "driver",
            "error",
            f"{version}, CUDA {needs.cuda} needs {'.'.join(map(str, least))} or newer",
            "the pinned torch cannot use a GPU with it",
            f"update the driver of the host, and the same version in the container{other}",
        )
    else:
        yield Finding(
            "driver", "ok", version + (f", enough for CUDA {needs.cuda}" if least is not None else "")
        )


def free(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether somebody holds one of the GPUs."""
    if not needs.gpus:
        return
    found = {
        int(i): gpu for gpu in mappings(seen.facts.get("gpus")) if (i := number(gpu.get("index"))) is not None
    }
    used = {gpu: _used_mib(found.get(gpu, {})) for gpu in needs.gpus}
    holders = [
        who for who in mappings(seen.facts.get("gpu_processes")) if _holds_one_of(who, needs, len(found))
    ]
    why = "training fills the memory of its GPUs, and ends out of memory beside another program"
    if holders:
        fixes = [
            f"make stop RUN_ID={text(who.get('run_id'))}"
            if text(who.get("run_id"))
            else f"pct exec {needs.container_id} -- kill {pid(who)}"
            for who in holders
        ]
        # What a run holds that is going on is where it belongs, which another check tells.
        others = [who for who in holders if text(who.get("run_id")) not in going_on(seen.facts)]
        severity: Severity = "error" if others else "warning"
        yield Finding(
            "free",
            severity,
            "held by " + "; ".join(named(who) for who in holders[:4]) + _more(len(holders) - 4),
            why,
            "end what holds them: " + "; ".join(dict.fromkeys(fixes[:4])),
        )
        return
    busy = [gpu for gpu in needs.gpus if used[gpu][0] > IDLE_MEMORY_MIB]
    if busy:
        gpu = busy[0]
        heavy = any(used[gpu][1] and used[gpu][0] > HELD_SHARE * used[gpu][1] for gpu in busy)
        yield Finding(
            "free",
            "error" if heavy else "warning",
            f"GPU {_list(busy)} in use ({used[gpu][0] / 1024:.1f} GiB on GPU {gpu}) by nobody in this container",
            why,
            "on the host: nvidia-smi --query-compute-apps=pid,gpu_uuid,used_memory,name --format=csv   "
            "(nobody there either: nvidia-smi --gpu-reset -i N, when no other container uses it)",
        )
    elif found:
        yield Finding("free", "ok", "nobody holds them")


def cuda_init(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether CUDA starts in the venv and computes on every GPU: nvidia-smi alone proves neither."""
    if not needs.gpus:
        return
    answer = seen.cuda
    if answer is None:
        yield Finding("cuda", "ok", f"not tried: {seen.cuda_untried}")
        return
    devices = mappings(answer.get("devices"))
    failed = [device for device in devices if text(device.get("error"))]
    error = text(answer.get("error"))
    if error or failed or answer.get("available") is not True:
        what = error or "; ".join(
            f"GPU {device.get('index')}: {text(device.get('error'))}" for device in failed
        )
        yield Finding(
            "cuda",
            "error",
            (what or "torch sees no GPU")[:400],
            "what training would do first fails",
            "the errors above first; then on the host: nvidia-modprobe -u -c 0, dmesg | grep -i -e nvrm -e xid, "
            f"and pct reboot {needs.container_id}",
        )
    elif len(devices) < len(needs.gpus):
        yield Finding(
            "cuda",
            "error",
            f"torch sees {len(devices)} of {len(needs.gpus)} GPUs",
            "each rank needs one",
            "check CUDA_VISIBLE_DEVICES under `env:` in the inventory, and targets and drafters",
        )
    else:
        yield Finding(
            "cuda", "ok", f"computes on {len(devices)} GPUs, CUDA {text(answer.get('cuda')) or '?'}"
        )


def _matters(path: str) -> bool:
    return bool(re.fullmatch(r"/dev/nvidia(\d+|ctl|-uvm)", path))


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _devices(seen: Seen, paths: list[str]) -> str:
    """The options of ``pct set`` that pass ``paths`` in, under numbers that the configuration does not use."""
    config = seen.config or {}
    free = (number for number in itertools.count() if f"dev{number}" not in config)
    return " ".join(f"--dev{next(free)} {path}" for path in paths)


def _version(version: str) -> tuple[int, ...]:
    return (
        tuple(int(part) for part in version.split("."))
        if re.fullmatch(r"\d{1,6}(\.\d{1,6}){0,3}", version)
        else ()
    )


def _used_mib(gpu: Mapping[str, Any]) -> tuple[float, float]:
    return number(gpu.get("memory_used_mib")) or 0.0, number(gpu.get("memory_total_mib")) or 0.0


def _holds_one_of(who: Mapping[str, Any], needs: Needs, there: int) -> bool:
    """Whether a process holds a GPU that the run uses. Nodes are numbered as the host's GPUs are, which is how the
    container's are when it has all of them; else any holder counts."""
    held = who.get("nodes")
    if len(needs.gpus) == there or not isinstance(held, list) or not held:
        return True
    return any(f"/dev/nvidia{gpu}" in held for gpu in needs.gpus)


def _more(count: int) -> str:
    return f"; and {count} more" if count > 0 else ""


CHECKS = (gpus, nodes, driver, free, cuda_init)
