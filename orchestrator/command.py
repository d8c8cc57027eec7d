"""One command on one SSH channel: quoted once, fed and read at the same time, its bytes left as they are."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import paramiko

from orchestrator.errors import LinkLost, TransportError, UsageError
from orchestrator.liveness import WatchedTransport

STDOUT_LIMIT_BYTES = 64 * 1024 * 1024
_READ_BYTES = 256 * 1024
_SEND_BYTES = 64 * 1024
_POLL_S = 0.25

BytesSink = Callable[[bytes], None]


@dataclass(frozen=True)
class Completed:
    """A remote command that ran to its end. ``stdout`` is empty when it went to a sink."""

    command: str
    exit_status: int
    stdout: bytes
    stderr: bytes

    def stderr_text(self) -> str:
        return self.stderr.decode("utf-8", errors="replace").strip()


@dataclass(frozen=True)
class Deadlines:
    """``timeout_s`` bounds a whole command, ``idle_timeout_s`` that without a byte from it or to it; None: no bound."""

    timeout_s: float | None = None
    idle_timeout_s: float | None = None

    def missed(self, started: float, last_byte: float) -> str | None:
        """Which of them has passed, in words, for a command of that start and last byte (monotonic seconds)."""
        now = time.monotonic()
        if self.timeout_s is not None and now - started > self.timeout_s:
            return f"did not end within {self.timeout_s:.0f} s"
        if self.idle_timeout_s is not None and now - last_byte > self.idle_timeout_s:
            return f"sent nothing for {self.idle_timeout_s:.0f} s"
        return None

    def first_s(self) -> float | None:
        """Seconds from its start until a command without a byte misses one."""
        return min(
            (limit for limit in (self.timeout_s, self.idle_timeout_s) if limit is not None), default=None
        )


class SinkFailed(Exception):
    """The desk could not take what came: its disk is full, its reader is gone. Not the link's fault."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def quote(argv: Sequence[str | bytes]) -> bytes:
    """The one string that SSH carries for ``argv``: quoted once, for the login shell at the other end.

    Raises :class:`UsageError` for an empty argv, for a NUL, which no argument can hold, and for half a surrogate pair,
    which no bytes stand for.
    """
    if not argv:
        raise UsageError("There is no command to run: the argument list is empty.")
    words = [os.fsdecode(word) for word in argv]
    if any("\0" in word for word in words):
        raise UsageError("A command's argument holds a NUL byte, which no program can be given.")
    try:
        return os.fsencode(shlex.join(words))
    except UnicodeEncodeError as error:
        broken = next(word for word in words if error.object[error.start] in word)
        raise UsageError(f"A command's argument is no text that can be sent: {broken[:100]!r}.") from None


def carry_out(
    channel: paramiko.Channel,
    name: str,
    command: bytes,
    stdin: bytes | Iterable[bytes],
    on_stdout: BytesSink | None,
    deadlines: Deadlines,
    *,
    status_timeout_s: float,
) -> Completed:
    """Run ``command`` on a session's fresh channel to the host ``name``, wait for its end, and close the channel.

    ``status_timeout_s``: how long the exit status may take once output has ended. Raises :class:`LinkLost` when the
    link breaks, the host falls silent or no exit status comes; :class:`TransportError` when a deadline passes or the
    output is beyond all bounds; :class:`UsageError` when ``stdin`` cannot be read; :class:`SinkFailed` for an OSError
    of ``on_stdout``, and whatever else that raises.
    """
    sender = _StdinSender(channel, stdin)
    try:
        started = time.monotonic()
        with _at_most(channel, deadlines.first_s()) as over:
            channel.exec_command(command)
        if over():
            raise paramiko.SSHException("the command was not begun in time")
        threading.Thread(target=sender.run, name=f"stdin to {name}", daemon=True).start()
        stdout, stderr = _read(channel, name, on_stdout, deadlines, started, sender)
        came = channel.status_event.wait(status_timeout_s)
        status = channel.recv_exit_status() if came else -1
    except (paramiko.SSHException, EOFError, OSError) as error:
        if missed := deadlines.missed(started, started) if over() else None:
            raise _too_late(name, missed) from None
        raise _lost(
            channel, name, f"broke during a command: {str(error) or type(error).__name__}."
        ) from error
    finally:
        sender.stop()
        with contextlib.suppress(Exception):
            channel.close()
    if status == -1:
        raise _lost(channel, name, "ended before the command's exit status came.")
    if isinstance(sender.error, OSError):
        raise UsageError(f"What was to be sent to {name} could not be read: {sender.error}.")
    if sender.error is not None:
        raise sender.error
    return Completed(os.fsdecode(command), status, stdout, stderr)


def _read(
    channel: paramiko.Channel,
    name: str,
    on_stdout: BytesSink | None,
    deadlines: Deadlines,
    started: float,
    sender: _StdinSender,
) -> tuple[bytes, bytes]:
    """All that the command prints, as (stdout, the last MiB of stderr)."""
    stdout, stderr = bytearray(), bytearray()
    last_byte = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(channel.fileno(), selectors.EVENT_READ)
        while True:
            received = False
            while channel.recv_stderr_ready():
                stderr += channel.recv_stderr(_READ_BYTES)
                del stderr[: -1024 * 1024]
                received = True
            while channel.recv_ready():
                data = channel.recv(_READ_BYTES)
                received = True
                if on_stdout is not None:
                    try:
                        on_stdout(data)
                    except OSError as error:
                        raise SinkFailed(error) from error
                    continue
                stdout += data
                if len(stdout) > STDOUT_LIMIT_BYTES:
                    raise TransportError(
                        f"{name}: a command printed more than {STDOUT_LIMIT_BYTES >> 20} MiB.",
                        "Fetch it as a file instead.",
                    )
            if received:
                last_byte = time.monotonic()
                continue
            if channel.eof_received or channel.closed:
                if channel.recv_ready() or channel.recv_stderr_ready():
                    continue
                return bytes(stdout), bytes(stderr)
            if missed := deadlines.missed(started, max(last_byte, sender.last_byte)):
                raise _too_late(name, missed)
            selector.select(_POLL_S)


@contextlib.contextmanager
def _at_most(channel: paramiko.Channel, limit_s: float | None) -> Iterator[Callable[[], bool]]:
    """Close the channel when the block takes longer: paramiko waits in it without a deadline. Yields whether it did."""
    over = threading.Event()

    def end() -> None:
        over.set()
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            channel.close()

    if limit_s is None:
        yield over.is_set
        return
    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield over.is_set
    finally:
        timer.cancel()


def _too_late(name: str, what: str) -> TransportError:
    return TransportError(
        f"A command on {name} {what}.",
        "What ran on the host may go on: look with `status` before a second try.",
    )


def _lost(channel: paramiko.Channel, name: str, what: str) -> LinkLost:
    transport = channel.get_transport()
    silent_s = transport.found_dead_after_s if isinstance(transport, WatchedTransport) else None
    return LinkLost(
        f"The link to {name} {what}"
        if silent_s is None
        else f"{name} fell silent during a command: no sign of life for {silent_s:.0f} s.",
        "What ran on the host may go on. Try again; nothing half-written is taken for whole.",
    )


class _StdinSender:
    """Sends a command its standard input from a thread of its own, and closes it.

    A command that ends without reading it all is not an error. A source that cannot be read is one: the command
    sees the end of its input there, and :attr:`error` says why.
    """

    def __init__(self, channel: paramiko.Channel, stdin: bytes | Iterable[bytes]) -> None:
        self._channel = channel
        self._chunks = iter([stdin] if isinstance(stdin, bytes) else stdin)
        self._stopped = threading.Event()
        self.error: Exception | None = None
        self.last_byte = time.monotonic()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            while not self._stopped.is_set() and (chunk := self._next()) is not None:
                for start in range(0, len(chunk), _SEND_BYTES):
                    self._channel.sendall(chunk[start : start + _SEND_BYTES])
                    self.last_byte = time.monotonic()
            self._channel.shutdown_write()

    def _next(self) -> bytes | None:
        try:
            return next(self._chunks, None)
        except Exception as error:  # noqa: BLE001 - raised again where the command is waited for
            self.error = error
            return None
