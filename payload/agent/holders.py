"""Who holds what a job needs: the processes that have a GPU open, and the one that listens on a port."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, Optional, Set

from payload.agent.protocol import Json
from payload.errors import PayloadError

_PROC = Path("/proc")
_GPU_NODE = re.compile(r"/dev/nvidia\d+")
_COMMAND_CHARACTERS = 300
MOST_PORT = 65535
_LISTENING = "0A"  # st of /proc/net/tcp: TCP_LISTEN


def gpu_processes(named_by_driver: Iterable[int]) -> List[Json]:
    """The processes that hold a GPU: those that have a ``/dev/nvidiaN`` open, and ``named_by_driver`` (pids).

    Each with ``pid``, ``command``, ``run_id`` (of a run of ours, else null) and ``nodes``. A process of another
    container or of the host is not seen from here unless the driver names its pid.
    """
    nodes_of: Dict[int, Set[str]] = {pid: set() for pid in named_by_driver}
    if any(Path("/dev").glob("nvidia[0-9]*")):
        for pid, link in _open_files():
            if _GPU_NODE.fullmatch(link):
                nodes_of.setdefault(pid, set()).add(link)
    return [{**describe(pid), "nodes": sorted(nodes)} for pid, nodes in sorted(nodes_of.items())]


def port(number: int) -> Json:
    """Whether a TCP port of the loopback address can be listened on: ``free``, ``reason`` and ``holder`` if not.

    0 tries any free port. Raises PayloadError of kind ``usage`` for a number that no port has.
    """
    if not 0 <= number <= MOST_PORT:
        raise PayloadError(f"there is no port {number}", kind="usage")
    found: Json = {"number": number, "free": True, "reason": None, "holder": None}
    with socket.socket() as probe:
        # As torch's store does: a port that only waits for old connections to time out is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
            probe.listen(1)
        except OSError as error:
            found.update(free=False, reason=error.strerror or str(error))
            if error.errno == errno.EADDRINUSE:
                found["holder"] = _listener(number)
    return found


def describe(pid: int) -> Json:
    """A process for a person: ``pid``, ``command`` (null when it cannot be read), ``run_id`` of a run of ours."""
    command = _read(pid, "cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()
    environment = dict(pair.partition(b"=")[::2] for pair in _read(pid, "environ").split(b"\0"))
    run_id = environment.get(b"DFLASH_RUN_ID", b"").decode("utf-8", "replace")
    return {"pid": pid, "command": command[:_COMMAND_CHARACTERS] or None, "run_id": run_id or None}


def _listener(number: int) -> Optional[Json]:
    """The process that listens on a port of this network namespace, when it can be told."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(number)}
    return next((describe(pid) for pid, link in _open_files() if link in wanted), None) if wanted else None


def _listening_inodes(number: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == number:
                    yield fields[9]


def _open_files() -> Iterator[tuple[int, str]]:
    """(pid, what its descriptor points at) for every process that this user may look into."""
    for process in _PROC.iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                for descriptor in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        yield int(process.name), str(descriptor.readlink())


def _read(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / name).read_bytes()
    return b""
