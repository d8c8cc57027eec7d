"""SSH to one host: one argv in, bytes and an exit status out.

Fabric opens the connection (:mod:`orchestrator.login`), since it knows ssh_config, agents, keys and ProxyJump. Three
things are done here that it leaves open: host keys are strict on every hop, commands run on a raw channel so that bytes
stay bytes (:mod:`orchestrator.command`), and a peer that falls silent is noticed within a deadline
(:mod:`orchestrator.liveness`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

import fabric
import paramiko
import tenacity

from orchestrator import login
from orchestrator.command import BytesSink, Completed, Deadlines, SinkFailed, carry_out, quote
from orchestrator.errors import TransportError
from orchestrator.settings import HostSettings

MOST_SESSIONS = 8
"""Commands at a time on one connection: sshd allows ten (MaxSessions), and counts one for a moment after its end."""


class Connection:
    """A connection to one host, opened at first use. Threads may share it: each command is a session of its own.

    A command that fails takes the connection down with it, since the link may be dead, unless others are at work
    on it: those go on, or notice for themselves.
    """

    def __init__(
        self, name: str, settings: HostSettings, notify: Callable[[str], None] = lambda _: None
    ) -> None:
        """``notify`` is told what is waited for, and why."""
        self.name = name
        self.settings = settings
        self.notify = notify
        self._fabric: fabric.Connection | None = None
        self._opening = threading.Lock()
        self._slots = threading.BoundedSemaphore(MOST_SESSIONS)
        self._counting = threading.Lock()
        self._sessions = 0

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Connect now, rather than with the first command. Raises as :meth:`run` does."""
        self._open()

    def close(self) -> None:
        connection, self._fabric = self._fabric, None
        if connection is not None:
            login.close(connection)

    def run(
        self,
        argv: Sequence[str | bytes],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        on_stdout: BytesSink | None = None,
        timeout_s: float | None = None,
        idle_timeout_s: float | None = None,
    ) -> Completed:
        """Run ``argv`` on the host and wait for its end.

        ``stdin`` is sent while output is read, so neither side can block the other. ``on_stdout`` takes standard
        output as it comes; without it the output is returned, up to 64 MiB. ``timeout_s`` bounds the whole
        command, ``idle_timeout_s`` the time without a byte from it or to it. Raises :class:`TransportError` when the
        host cannot be reached, the link breaks, a deadline passes, or no exit status arrives;
        :class:`orchestrator.errors.UsageError` when ``stdin`` cannot be read; and whatever ``on_stdout`` raises.
        """
        command = quote(argv)
        with self._slots:
            with self._counting:
                self._sessions += 1
            try:
                return carry_out(
                    self._open_channel(),
                    self.name,
                    command,
                    stdin,
                    on_stdout,
                    Deadlines(timeout_s, idle_timeout_s),
                    status_timeout_s=self.settings.silence_timeout_s,
                )
            except SinkFailed as failed:
                self._give_up()
                raise failed.error from None
            except TransportError:
                self._give_up()
                raise
            finally:
                with self._counting:
                    self._sessions -= 1

    def _give_up(self) -> None:
        """Close after a failure, unless another thread's command is at work on the connection."""
        with self._counting:
            if self._sessions > 1:
                return
        self.close()

    def _open_channel(self) -> paramiko.Channel:
        retrying = tenacity.Retrying(
            # sshd frees a session a moment after its client has closed it.
            retry=tenacity.retry_if_exception_type(_SessionRefused),
            stop=tenacity.stop_after_delay(self.settings.silence_timeout_s),
            wait=tenacity.wait_exponential_jitter(multiplier=0.05, max=1, jitter=0.2),
            reraise=True,
        )
        try:
            return retrying(self._open_session)
        except _SessionRefused as error:
            raise self._no_session(error) from error
        except (paramiko.SSHException, EOFError, OSError):
            # The connection died since its last use: nothing was sent on this channel, so a second try is safe.
            self._give_up()
        try:
            return self._open_session()
        except (_SessionRefused, paramiko.SSHException, EOFError, OSError) as error:
            raise self._no_session(error) from error

    def _open_session(self) -> paramiko.Channel:
        transport = self._open().transport
        try:
            return transport.open_session(timeout=self.settings.silence_timeout_s)
        except paramiko.SSHException as error:
            # Where several are refused at once, paramiko hands one thread the error of another, and that one a vague
            # one: on a connection that lives, all of them are refusals.
            if transport.is_active():
                raise _SessionRefused(str(error)) from error
            raise

    def _no_session(self, error: Exception) -> TransportError:
        return TransportError(
            f"{self.name} refused another session: {str(error) or type(error).__name__}.",
            "sshd's MaxSessions may be reached; try again.",
        )

    def _open(self) -> fabric.Connection:
        with self._opening:
            if self._fabric is None or not self._fabric.is_connected:
                self.close()
                self._fabric = login.log_in(self.name, self.settings, self.notify)
            return self._fabric


class _SessionRefused(Exception):
    """The connection lives, and the host opens no further session on it now."""
