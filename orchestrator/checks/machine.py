"""Checks of the container itself: its lock, clock, disk, shared memory, compiler, init system and ports."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.checks.model import Finding, Needs, Seen, Severity, gib, mapping, named, number, text

CLOCK_TOLERANCE_S = 5.0
CLOCK_LIMIT_S = 3600.0

GPU_RUN_BYTES = 2 * 2**30
CPU_RUN_BYTES = 2**28
"""Below these, the first checkpoints and the log of a run fill the disk."""
CUDA_VENV_BYTES = 12 * 2**30
"""A venv with a CUDA build of torch unpacks to about 8 GB, besides the wheels that uv keeps."""
CPU_VENV_BYTES = 3 * 2**30
COMFORTABLE_BYTES = 20 * 2**30
LEAST_INODES = 50_000
"""A venv alone has about 40,000 files."""

SHM_ERROR_BYTES = 64 * 2**20
SHM_WARNING_BYTES = 2**30
"""NCCL's own advice for containers is 1 GiB; with Docker's 64 MiB, eight ranks fail with a system error."""


def lock(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether a backup, snapshot or migration holds the container."""
    if seen.config is None:
        return
    held_by = seen.config.get("lock", "")
    if held_by:
        yield Finding(
            "lock",
            "error",
            f"locked by Proxmox: {held_by}",
            "a backup or snapshot may freeze or copy the container in the middle of a step",
            f"on the host, wait for its end: pct config {needs.container_id} | grep ^lock   "
            f"(left over from a task that died: pct unlock {needs.container_id})",
        )
    else:
        yield Finding("lock", "ok", "not locked")


def clock(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether desk and container agree about the time."""
    ahead_s = seen.clock_ahead_s
    if ahead_s is None:
        return
    apart_s = max(0.0, abs(ahead_s) - seen.clock_uncertainty_s)
    what = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the desk"
    if apart_s <= CLOCK_TOLERANCE_S:
        yield Finding("clock", "ok", "agrees with the desk's")
        return
    yield Finding(
        "clock",
        "error" if apart_s > CLOCK_LIMIT_S else "warning",
        what,
        "`logs SINCE=`, run ids and ages are by these clocks, and certificates are refused when one is far off",
        "where `date -u` is wrong, on the host (a container has its clock) or at the desk: timedatectl set-ntp true",
    )


def disk(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether what will be written fits: a venv if there is none yet, checkpoints, a log."""
    facts = seen.facts
    if facts.get("writable") is False:
        yield Finding(
            "disk",
            "error",
            "the root folder cannot be written",
            "releases, venvs and runs all lie under it",
            "check `root:` in the inventory, and whether its file system is mounted read-only",
        )
        return
    free = number(mapping(facts.get("disk")).get("free_bytes"))
    if free is None:
        yield Finding(
            "disk",
            "warning",
            "its free space cannot be told",
            "a full disk ends a run",
            f"on the host: pct df {needs.container_id}",
        )
        return
    venv_bytes = 0 if facts.get("venv") else CUDA_VENV_BYTES if needs.gpus else CPU_VENV_BYTES
    run_bytes = GPU_RUN_BYTES if needs.gpus else CPU_RUN_BYTES
    purpose = f"{gib(venv_bytes)} for the venv and " if venv_bytes else ""
    wanted = f"{gib(free)} free, {purpose}{gib(run_bytes)} for a run are the least"
    grow = (
        f"make room (make prune; rm -r old runs), or on the host: pct resize {needs.container_id} rootfs "
        f"+{max(1, round((COMFORTABLE_BYTES - free) / 2**30))}G"
    )
    inodes = number(facts.get("inodes_free"))
    if free < venv_bytes + run_bytes:
        yield Finding("disk", "error", wanted, "the venv or a checkpoint would not fit", grow)
    elif inodes is not None and inodes < LEAST_INODES:
        yield Finding(
            "disk", "error", f"room for only {inodes:.0f} more files", "a venv has some 40,000 files", grow
        )
    elif needs.gpus and free < COMFORTABLE_BYTES:
        yield Finding(
            "disk", "warning", wanted, "checkpoints with their optimizer state grow with every one", grow
        )
    else:
        yield Finding("disk", "ok", f"{gib(free)} free")


def shared_memory(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether /dev/shm holds what the ranks of one machine exchange through it."""
    shm = mapping(seen.facts.get("shm"))
    free, total = number(shm.get("free_bytes")), number(shm.get("total_bytes"))
    fix = (
        "in the container: mount -o remount,size=8G /dev/shm   (for good, in "
        f"/etc/pve/lxc/{needs.container_id}.conf: "
        "lxc.mount.entry: tmpfs dev/shm tmpfs rw,nosuid,nodev,create=dir,size=8G 0 0)"
    )
    why = "NCCL and data loaders exchange through it: too small, ranks end with a system or bus error"
    if free is None:
        if needs.gpus:
            yield Finding("shm", "error", "there is no /dev/shm", why, fix)
        return
    what = f"{gib(free)} free of {gib(total or free)}"
    many = needs.gpus and needs.ranks > 1
    if many and free < SHM_ERROR_BYTES:
        yield Finding("shm", "error", what, why, fix)
    elif (many and free < SHM_WARNING_BYTES) or free < SHM_ERROR_BYTES:
        yield Finding("shm", "warning", what, why, fix)
    else:
        yield Finding("shm", "ok", what)


def compiler(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether Triton (a C compiler) and inductor (g++), which both build Python extensions, can work."""
    facts = seen.facts
    compilers = mapping(facts.get("compilers"))
    wanted = ("gcc", "clang", "cc") if needs.gpus else ("g++", "clang")
    found = next((text(compilers.get(name)) for name in wanted if text(compilers.get(name))), "")
    missing = ([] if found else [wanted[0]]) + ([] if text(facts.get("python_h")) else ["Python.h"])
    if not missing:
        yield Finding("compiler", "ok", f"{found}, Python.h")
        return
    severity: Severity = "error" if needs.must_compile else "warning"
    version = text(mapping(facts.get("python")).get("version"))
    minor = ".".join(version.split(".")[:2]) if version[:2] == "3." else "3"
    yield Finding(
        "compiler",
        severity,
        f"no {' and no '.join(missing)}",
        "Triton and inductor build small extension modules while they compile; without, "
        + ("training fails in its first step" if needs.must_compile else "the run stays eager, and slower"),
        f"on the host: pct exec {needs.container_id} -- apt-get install -y gcc g++ libc6-dev python{minor}-dev",
    )


def init_system(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether systemd can keep a job, which nesting decides in an unprivileged container."""
    facts = seen.facts
    if facts.get("systemd") is True:
        yield Finding("init", "ok", "systemd starts units")
        return
    init = mapping(facts.get("init"))
    if text(init.get("name")) == "systemd" and text(init.get("container")):
        features = (seen.config or {}).get("features", "")
        nested = "nesting=1" in features.split(",")
        yield Finding(
            "init",
            "warning",
            "systemd is process 1 and starts no units" + ("" if nested else ", nesting is off"),
            "a job is kept by a supervisor of its own then, without the unit's clean end at a shutdown",
            f"on the host: pct set {needs.container_id} --features nesting=1 && pct reboot {needs.container_id}"
            if not nested
            else f"on the host: pct exec {needs.container_id} -- apt-get install -y systemd dbus",
        )
    else:
        yield Finding("init", "ok", "no systemd of its own; the agent keeps the job itself")


def port(seen: Seen, needs: Needs) -> Iterator[Finding]:
    """Whether the ranks of a job can meet: the loopback address, and the port of the master."""
    found = mapping(seen.facts.get("port"))
    if found.get("free") is True:
        yield Finding("port", "ok", f"port {needs.port} is free")
        return
    if found.get("free") is not False:
        return
    holder, reason = mapping(found.get("holder")), text(found.get("reason")) or "no reason given"
    if "in use" in reason:
        who = f" by {named(holder)}" if holder else ""
        yield Finding(
            "port",
            "warning",
            f"port {needs.port} is held{who}",
            "a job within one container takes another, but one over several containers meets there",
            "end the holder, or set MASTER_PORT under `env:` in the inventory to a free port",
        )
    else:
        yield Finding(
            "port",
            "error",
            f"no port of the loopback address can be listened on: {reason}",
            "the ranks of a job meet there",
            f"on the host: pct exec {needs.container_id} -- ip link set lo up",
        )


CHECKS = (lock, clock, disk, shared_memory, compiler, init_system, port)
