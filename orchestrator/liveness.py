"""Whether the host at the other end of an SSH connection still lives.

paramiko sends keepalives and never looks for an answer, and TCP knows only whether the kernel at its other end
acknowledges: a host that is frozen, or gone behind a router that is not, would be waited for without end. Here whatever
comes from the host is a sign of life, and a host that is silent is asked for one.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any, cast

import paramiko

from orchestrator.ordered_transport import OrderedTransport

_ASKED_BEFORE_GIVEN_UP = 3
_LOOKS_BETWEEN_QUESTIONS = 16
_TCP_USER_TIMEOUT_S = 40


class WatchedTransport(OrderedTransport):
    """An SSH transport that knows for how long its peer has been silent."""

    def __init__(self, sock: socket.socket | paramiko.Channel, **options: Any) -> None:
        if isinstance(sock, socket.socket):
            # Small packets leave at once: else the login, and every command after the first, waits some 40 ms for the
            # acknowledgement of what was sent before (Nagle's algorithm against delayed acknowledgements).
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_S * 1000)
        self._heard = _HeardSocket(sock)
        self._asked_at = self._heard.at
        self.found_dead_after_s: float | None = None
        """How long the peer had been silent when it was given up; None while it was not."""
        super().__init__(cast(socket.socket, self._heard), **options)

    def silent_for_s(self) -> float:
        """Seconds since the last byte from the peer. It says nothing unasked: see :meth:`ask_for_signs_of_life`."""
        return time.monotonic() - self._heard.at

    def is_dead(self, silence_timeout_s: float) -> bool:
        """Whether the peer has been silent for so long, although it was asked.

        Time in which the desk itself stood still (Ctrl-Z) does not count: nothing was asked then.
        """
        unanswered_s = time.monotonic() - self._asked_at if self._asked_at > self._heard.at else 0.0
        return unanswered_s > silence_timeout_s - silence_timeout_s / _ASKED_BEFORE_GIVEN_UP

    def ask_for_signs_of_life(self, silence_timeout_s: float) -> None:
        """From now on, ask whenever a third of ``silence_timeout_s`` has passed in silence, and close when it is dead.

        Threads of its own do both: one that uses the connection may wait for an answer in paramiko, or for room to
        send, without a deadline. The end of the transport ends every such wait.
        """
        every_s = silence_timeout_s / _ASKED_BEFORE_GIVEN_UP

        def ask() -> None:
            while self.is_active():
                time.sleep(max(0.1, every_s - self.silent_for_s()))
                if self.silent_for_s() >= every_s:
                    self._asked_at = time.monotonic()
                    with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                        # Every server answers, be it with a refusal (RFC 4254, 4). Returns when the transport ends.
                        self.global_request("keepalive@openssh.com", wait=True)

        def watch() -> None:
            pause_s = every_s / _LOOKS_BETWEEN_QUESTIONS
            while self.is_active():
                began = time.monotonic()
                time.sleep(pause_s)
                # After Ctrl-Z the answers that came meanwhile have still to be read.
                stood_still = time.monotonic() - began > 2 * pause_s + 1
                if not stood_still and self.is_dead(silence_timeout_s):
                    self.found_dead_after_s = self.silent_for_s()
                    with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                        self.close()

        threading.Thread(target=ask, name="asking for signs of life", daemon=True).start()
        threading.Thread(target=watch, name="watching for signs of life", daemon=True).start()


class _HeardSocket:
    """A socket, or a jump host's channel, that notes when something came from it."""

    def __init__(self, sock: socket.socket | paramiko.Channel) -> None:
        self._sock = sock
        self.at = time.monotonic()

    def recv(self, size: int) -> bytes:
        data = self._sock.recv(size)
        if data:
            self.at = time.monotonic()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)
