"""A TCP link between desk and host that breaks, stalls and lags when a test says so."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

_CHUNK_BYTES = 16 * 1024
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Fault:
    """What happens to one connection once ``after_bytes`` have passed in the direction ``toward``.

    ``cut``: both ends see a reset. ``stall``: nothing passes any more in either direction, and nobody is told.
    """

    kind: Literal["cut", "stall"]
    after_bytes: int
    toward: Literal["desk", "host"] = "desk"


class FaultyLink:
    """Listens on a loopback port of its own and passes everything to ``target_port`` and back.

    The first connections meet ``faults``, one each; those after them are sound. ``lag_s`` delays every chunk.
    """

    def __init__(self, target_port: int, faults: Iterable[Fault] = (), *, lag_s: float = 0.0) -> None:
        self._target_port = target_port
        self.faults = deque(faults)
        self.lag_s = lag_s
        self.connections = 0
        self._stalled = threading.Event()
        self._pairs: list[_Pair] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> FaultyLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Reset every connection that there is."""
        for pair in self._pairs:
            pair.cut()

    def stall(self) -> None:
        """From now on nothing passes, on connections old and new, and nobody is told."""
        self._stalled.set()

    def heal(self) -> None:
        """End a :meth:`stall`."""
        self._stalled.clear()

    def _accept(self) -> None:
        while True:
            try:
                desk, _ = self._listener.accept()
                host = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                return
            self.connections += 1
            pair = _Pair(desk, host, self.faults.popleft() if self.faults else None)
            self._pairs.append(pair)
            for source, target, toward in ((desk, host, "host"), (host, desk, "desk")):
                threading.Thread(target=self._pass, args=(pair, source, target, toward), daemon=True).start()

    def _pass(self, pair: _Pair, source: socket.socket, target: socket.socket, toward: str) -> None:
        passed = 0
        fault = pair.fault
        mine = fault if fault is not None and fault.toward == toward else None
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                if mine is not None and passed + len(data) >= mine.after_bytes:
                    target.sendall(data[: max(0, mine.after_bytes - passed)])
                    pair.cut() if mine.kind == "cut" else pair.stalled.set()
                    if mine.kind == "cut":
                        return
                while (pair.stalled.is_set() or self._stalled.is_set()) and not pair.over:
                    time.sleep(0.02)
                if pair.stalled.is_set():
                    return
                time.sleep(self.lag_s)
                target.sendall(data)
                passed += len(data)
            target.shutdown(socket.SHUT_WR)


class _Pair:
    """The two ends of one connection."""

    def __init__(self, desk: socket.socket, host: socket.socket, fault: Fault | None) -> None:
        self._ends = (desk, host)
        self.fault = fault
        self.stalled = threading.Event()
        self.over = False

    def cut(self) -> None:
        self.over = True
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                # A thread that waits in recv keeps the socket open beyond close(2).
                end.shutdown(socket.SHUT_RD)
            with contextlib.suppress(OSError):
                end.close()
