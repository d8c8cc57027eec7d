"""SSH to one host: one argv in, bytes and an exit status out.

Fabric opens the connection, since it knows ssh_config, agents, keys and ProxyJump. Three things are done here that
it leaves open: host keys are strict on every hop, commands run on a raw channel so that bytes stay bytes, and a
peer that falls silent is noticed within a deadline.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import fabric
import paramiko
import tenacity
from invoke.exceptions import AuthFailure

from orchestrator.errors import LinkLost, TransportError, UsageError
from orchestrator.hostkeys import HostKeyRefused, changed_key_error, trust_only_known_hosts, unknown_key_error
from orchestrator.inventory import from_here
from orchestrator.liveness import WatchedTransport
from orchestrator.localnode.layout import DEFAULT_STATE, state_of
from orchestrator.settings import HostSettings

CONNECT_ATTEMPTS = 3
MOST_SESSIONS = 8
"""Commands at a time on one connection: sshd allows ten (MaxSessions), and counts one for a moment after its end."""
STDOUT_LIMIT_BYTES = 64 * 1024 * 1024
_READ_BYTES = 256 * 1024
_POLL_S = 0.25

# paramiko logs tracebacks of what is raised here in words; without a handler, Python would print them.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

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


class Connection:
    """A connection to one host, opened at first use. Threads may share it: each command is a session of its own.

    A command that fails takes the connection down with it, since the link may be dead, unless others are at work
    on it: those go on, or notice for themselves.
    """

    def __init__(
        self,
        name: str,
        settings: HostSettings,
        notify: Callable[[str], None] = lambda _: None,
        *,
        wait_for_silent: bool = True,
    ) -> None:
        """``wait_for_silent``: whether a host that let a whole timeout pass while one connects is tried again."""
        self.name = name
        self._wait_for_silent = wait_for_silent
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
            with contextlib.suppress(Exception):
                connection.close()

    def _give_up(self) -> None:
        """Close after a failure, unless another thread's command is at work on the connection."""
        with self._counting:
            if self._sessions > 1:
                return
        self.close()

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
        command, ``idle_timeout_s`` the time without a byte from it. Raises :class:`TransportError` when the host
        cannot be reached, the link breaks, a deadline passes, or no exit status arrives; :class:`UsageError` when
        ``stdin`` cannot be read; and whatever ``on_stdout`` raises.
        """
        command = quote(argv)
        with self._slots:
            with self._counting:
                self._sessions += 1
            try:
                return self._run(command, stdin, on_stdout, timeout_s, idle_timeout_s)
            finally:
                with self._counting:
                    self._sessions -= 1

    def _run(
        self,
        command: bytes,
        stdin: bytes | Iterable[bytes],
        on_stdout: BytesSink | None,
        timeout_s: float | None,
        idle_timeout_s: float | None,
    ) -> Completed:
        channel = self._open_channel()
        sender = _StdinSender(channel, stdin)
        try:
            channel.exec_command(command)
            threading.Thread(target=sender.run, name=f"stdin to {self.name}", daemon=True).start()
            stdout, stderr = self._read(channel, on_stdout, timeout_s, idle_timeout_s)
            came = channel.status_event.wait(self.settings.silence_timeout_s)
            status = channel.recv_exit_status() if came else -1
        except _SinkFailed as failed:
            self._give_up()
            raise failed.error from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            self._give_up()
            raise LinkLost(
                f"The link to {self.name} broke during a command: {str(error) or type(error).__name__}.",
                "What ran on the host may go on. Try again; nothing half-written is taken for whole.",
            ) from error
        finally:
            sender.stop()
            with contextlib.suppress(Exception):
                channel.close()
        if status == -1:
            self._give_up()
            raise LinkLost(
                f"The link to {self.name} ended before the command's exit status came.",
                "What ran on the host may go on. Try again; nothing half-written is taken for whole.",
            )
        if sender.source_error is not None:
            raise UsageError(f"What was to be sent to {self.name} could not be read: {sender.source_error}.")
        return Completed(os.fsdecode(command), status, stdout, stderr)

    def _read(
        self,
        channel: paramiko.Channel,
        on_stdout: BytesSink | None,
        timeout_s: float | None,
        idle_timeout_s: float | None,
    ) -> tuple[bytes, bytes]:
        stdout, stderr = bytearray(), bytearray()
        started = last_byte = time.monotonic()
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
                            raise _SinkFailed(error) from error
                        continue
                    stdout += data
                    if len(stdout) > STDOUT_LIMIT_BYTES:
                        raise TransportError(
                            f"{self.name}: a command printed more than {STDOUT_LIMIT_BYTES >> 20} MiB.",
                            "Fetch it as a file instead.",
                        )
                if received:
                    last_byte = time.monotonic()
                    continue
                if channel.eof_received or channel.closed:
                    if channel.recv_ready() or channel.recv_stderr_ready():
                        continue
                    return bytes(stdout), bytes(stderr)
                self._check_that_the_host_lives(channel)
                now = time.monotonic()
                if timeout_s is not None and now - started > timeout_s:
                    raise self._too_late(f"did not end within {timeout_s:.0f} s")
                if idle_timeout_s is not None and now - last_byte > idle_timeout_s:
                    raise self._too_late(f"sent nothing for {idle_timeout_s:.0f} s")
                selector.select(_POLL_S)

    def _check_that_the_host_lives(self, channel: paramiko.Channel) -> None:
        transport = channel.get_transport()
        if isinstance(transport, WatchedTransport) and transport.is_dead(self.settings.silence_timeout_s):
            silent_s = transport.silent_for_s()
            # For every command on it: no answer will come to any, and none may wait to send.
            self.close()
            raise LinkLost(
                f"{self.name} fell silent during a command: no sign of life for {silent_s:.0f} s.",
                "What ran on the host may go on. Try again; nothing half-written is taken for whole.",
            )

    def _too_late(self, what: str) -> TransportError:
        self._give_up()
        return TransportError(
            f"A command on {self.name} {what}.",
            "What ran on the host may go on: look with `status` before a second try.",
        )

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
        self._give_up()
        return TransportError(
            f"{self.name} refused another session: {str(error) or type(error).__name__}.",
            "sshd's MaxSessions may be reached; try again.",
        )

    def _open(self) -> fabric.Connection:
        with self._opening:
            if self._fabric is None or not self._fabric.is_connected:
                self.close()
                self._fabric = self._connect_with_patience()
            return self._fabric

    def _connect_with_patience(self) -> fabric.Connection:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(
                lambda error: isinstance(error, _Retryable) and (self._wait_for_silent or not error.silent)
            ),
            # A host that let one try wait until its deadline is not asked again.
            stop=tenacity.stop_after_attempt(CONNECT_ATTEMPTS)
            | tenacity.stop_after_delay(self.settings.connect_timeout_s),
            wait=tenacity.wait_exponential_jitter(multiplier=0.3, max=3, jitter=0.3),
            before_sleep=self._tell_of_retry,
            reraise=True,
        )
        try:
            return retrying(self._connect)
        except _Retryable as error:
            raise TransportError(error.message, error.hint) from error.__cause__

    def _tell_of_retry(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        why = error.message.rstrip(".") if isinstance(error, _Retryable) else self.name
        wait_s = state.next_action.sleep if state.next_action else 0.0
        self.notify(
            f"{why} (try {state.attempt_number} of {CONNECT_ATTEMPTS}); trying again in {wait_s:.1f} s"
        )

    def _connect(self) -> fabric.Connection:
        settings = self.settings
        connection = self._configured()
        trust_only_known_hosts(connection, settings.known_hosts)
        where = f"{connection.user}@{connection.host}:{connection.port}"
        began = time.monotonic()
        try:
            connection.open()
        except HostKeyRefused as error:
            raise unknown_key_error(self.name, error, connection.port, settings.known_hosts) from None
        except paramiko.BadHostKeyException as error:
            raise changed_key_error(self.name, error, connection.port, settings.known_hosts) from None
        except (paramiko.AuthenticationException, paramiko.PasswordRequiredException, AuthFailure) as error:
            raise self._no_key_accepted(connection, str(error)) from None
        except UnicodeError:
            raise UsageError(f"{self.name}: {connection.host!r} is not a host's name or address.") from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            with contextlib.suppress(Exception):
                connection.close()
            if "No authentication methods available" in str(error):
                raise self._no_key_accepted(connection, "there is none to offer") from None
            raise _Retryable(
                f"{self.name}: no SSH connection to {where}: {_reason(error)}.",
                self._how_to_reach(),
                silent=time.monotonic() - began >= settings.connect_timeout_s,
            ) from error
        connection.transport.ask_for_signs_of_life(settings.silence_timeout_s)
        return connection

    def _how_to_reach(self) -> str:
        state = state_of(self.settings.pct, self.settings.known_hosts)
        if state is None:
            return "Is the host up, and are address and port right in the inventory?"
        where = str(from_here(Path(state)))
        variable = "" if where == DEFAULT_STATE else f"DFLASH_NODE={shlex.quote(where)} "
        return (
            f"This inventory is an embedded node's, which does not run. Start it: {variable}make node-start"
        )

    def _no_key_accepted(self, connection: fabric.Connection, why: str) -> TransportError:
        login = f"{connection.user}@{connection.host}"
        return TransportError(
            f"{self.name}: {login}:{connection.port} accepts none of your keys ({why}).",
            f"Put your public key there (ssh-copy-id -p {connection.port} {login}), or name the key with identity_file "
            "in the inventory. A key with a passphrase: ssh-add it first.",
        )

    def _configured(self) -> fabric.Connection:
        """A connection that is not open yet, by ssh_config and the inventory. Raises :class:`UsageError`."""
        settings = self.settings
        connect_kwargs: dict[str, object] = {
            "banner_timeout": settings.connect_timeout_s,
            "auth_timeout": settings.connect_timeout_s,
            "transport_factory": WatchedTransport,
        }
        if settings.identity_file:
            connect_kwargs |= self._only_key(Path(settings.identity_file).expanduser())
        try:
            # Lazy: fabric.yml files are no part of this; ssh_config is.
            config = fabric.Config(lazy=True)
            config.load_ssh_config()
            return fabric.Connection(
                settings.address or self.name,
                user=settings.user,
                port=settings.port,
                config=config,
                connect_timeout=settings.connect_timeout_s,
                connect_kwargs=connect_kwargs,
            )
        except (paramiko.ConfigParseError, OSError) as error:
            raise UsageError(f"Your ssh_config cannot be used: {error}.") from None
        except UnicodeDecodeError as error:
            raise UsageError(f"Your ssh_config is not UTF-8 text: {error}.") from None
        except ValueError as error:
            raise UsageError(
                f"{self.name}: the address {settings.address or self.name!r} cannot be used: {error}.",
                "Give user and port by their own keys in the inventory.",
            ) from None

    def _only_key(self, key: Path) -> dict[str, object]:
        """How to offer ``key`` and no other; one with a passphrase is left to the agent."""
        try:
            paramiko.PKey.from_path(key)
        except paramiko.PasswordRequiredException:
            return {"allow_agent": True, "look_for_keys": False}
        except FileNotFoundError:
            raise UsageError(
                f"{self.name}: identity_file {key} is not there.", "Correct the inventory, or make the key."
            ) from None
        except (paramiko.SSHException, UnicodeDecodeError, ValueError, TypeError, OSError) as error:
            if "password" in str(error).lower() or "encrypted" in str(error).lower():
                return {"allow_agent": True, "look_for_keys": False}
            raise UsageError(
                f"{self.name}: identity_file {key} is no private key that can be read: {error}."
            ) from None
        return {"key_filename": str(key), "allow_agent": False, "look_for_keys": False}


class _Retryable(TransportError):
    """No connection yet, so nothing was asked of the host: trying again is safe."""

    def __init__(self, message: str, hint: str, *, silent: bool) -> None:
        super().__init__(message, hint)
        self.silent = silent


class _SessionRefused(Exception):
    """The connection lives, and the host opens no further session on it now."""


class _SinkFailed(Exception):
    """The desk could not take what came: its disk is full, its reader is gone. Not the link's fault."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def quote(argv: Sequence[str | bytes]) -> bytes:
    """The one string that SSH carries for ``argv``: quoted once, for the login shell at the other end.

    Raises :class:`UsageError` for an empty argv and for a NUL, which no argument can hold.
    """
    if not argv:
        raise UsageError("There is no command to run: the argument list is empty.")
    words = [os.fsdecode(word) for word in argv]
    if any("\0" in word for word in words):
        raise UsageError("A command's argument holds a NUL byte, which no program can be given.")
    return os.fsencode(shlex.join(words))


def _reason(error: BaseException) -> str:
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        first = next(iter(error.errors.values()), error)
        return getattr(first, "strerror", None) or str(first)
    if isinstance(error, TimeoutError) or "banner" in str(error) or "No existing session" in str(error):
        return "no answer in time"
    return str(error) or type(error).__name__


class _StdinSender:
    """Sends a command its standard input from a thread of its own, and closes it.

    A command that ends without reading it all is not an error. A source that cannot be read is one: the command
    sees the end of its input there, and :attr:`source_error` says why.
    """

    def __init__(self, channel: paramiko.Channel, stdin: bytes | Iterable[bytes]) -> None:
        self._channel = channel
        self._chunks = iter([stdin] if isinstance(stdin, bytes) else stdin)
        self._stopped = threading.Event()
        self.source_error: OSError | None = None

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            while not self._stopped.is_set() and (chunk := self._next()) is not None:
                self._channel.sendall(chunk)
            self._channel.shutdown_write()

    def _next(self) -> bytes | None:
        try:
            return next(self._chunks, None)
        except OSError as error:
            self.source_error = error
            return None
