"""One SSH session: a command run by the login shell, its three streams, its end.

Follows OpenSSH's sshd for sessions without a terminal:

- the command is one string, and the user's login shell reads it: ``execv(shell, [shell, "-c", command])``. This is
  the one place of the project where a shell sees text, because every SSH server has it, and quoting must be proved
  against it;
- the streams are pipes; the exit status is sent when the command ends, and the channel is closed once both outputs
  are at their end, which a background process may put off;
- a client that goes away closes the pipes and nothing else: a command that reads or writes them notices, any other
  runs on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import asyncssh
from asyncssh.channel import SSHChannel
from asyncssh.packet import Boolean, SSHPacket, String, UInt32

_CHUNK_BYTES = 128 * 1024
_WINDOW_BYTES = 2 * 1024 * 1024
_PACKET_BYTES = 32 * 1024
_SFTP_VERSION = 3
_ACCEPTED_ENVIRONMENT = ("LANG", "LC_")  # Debian's sshd: AcceptEnv LANG LC_*


def _sftp_server(channel: SSHChannel[bytes]) -> asyncssh.SFTPServer:
    assert isinstance(channel, asyncssh.SSHServerChannel)
    return asyncssh.SFTPServer(channel)


class SshdChannel(asyncssh.SSHServerChannel[bytes]):
    """A channel with three habits of sshd that asyncssh's own lacks: commands may be any bytes, an exit status may come
    before the end of the output, and no more is held of a stream than its window."""

    def __init__(self, connection: asyncssh.SSHServerConnection) -> None:
        super().__init__(
            connection,
            asyncio.get_running_loop(),
            allow_pty=False,
            line_editor=False,
            line_echo=False,
            line_history=0,
            max_line_length=0,
            encoding=None,
            errors="strict",
            window=_WINDOW_BYTES,
            max_pktsize=_PACKET_BYTES,
        )

    def _process_exec_request(self, packet: SSHPacket) -> bool:
        command = packet.get_string()
        packet.check_end()
        return self._start_session(command=command.decode("utf-8", "surrogateescape"))

    def _deliver_data(self, data: bytes, datatype: asyncssh.DataType) -> None:
        # asyncssh opens the whole window with the first packet of those that it held back, though the others are held
        # still: a client that is faster than the command then fills the memory.
        if self._recv_buf and self._session is not None:
            self._session.data_received(data, datatype)
        else:
            super()._deliver_data(data, datatype)

    def report_end(self, returncode: int) -> None:
        """Tell the client how the command ended; the channel stays open for the rest of its output."""
        if self.is_closing():
            return
        if returncode >= 0:
            self._send_request(b"exit-status", UInt32(returncode))
        else:
            name = signal.Signals(-returncode).name.removeprefix("SIG")
            self._send_request(b"exit-signal", String(name), Boolean(False), String(""), String(""))


class ExecSession(asyncssh.SSHServerProcess[bytes]):
    """Runs what the client asks for: a command, a shell that reads standard input, or the SFTP server."""

    def __init__(self, environment: Mapping[str, str], shell: str, on_end: Callable[[], None]) -> None:
        super().__init__(self._run, _sftp_server, _SFTP_VERSION, False)
        self._session_environment = environment
        self._shell = shell
        self._on_end = on_end

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_end()

    def subsystem_requested(self, subsystem: str) -> bool:
        return subsystem == "sftp"

    async def _run(self, session: asyncssh.SSHServerProcess[bytes]) -> None:
        channel = session.channel
        assert isinstance(channel, SshdChannel)
        try:
            child = self._spawn(session)
        except (OSError, ValueError) as error:
            session.stderr.write(f"{self._shell}: {getattr(error, 'strerror', None) or error}\n".encode())
            channel.report_end(1)
            channel.close()
            return
        assert child.stdin
        assert child.stdout
        assert child.stderr
        ended = _when_ended(child)
        for pipe in (child.stdin, child.stdout, child.stderr):
            os.set_blocking(pipe.fileno(), False)
        stdin = asyncio.create_task(_forward_input(session.stdin, child.stdin, child.pid))
        outputs = [
            asyncio.create_task(_forward_output(child.stdout.fileno(), session.stdout)),
            asyncio.create_task(_forward_output(child.stderr.fileno(), session.stderr)),
        ]
        gone = asyncio.create_task(channel.wait_closed())
        report = asyncio.create_task(_report_end(channel, ended))
        done = asyncio.create_task(asyncio.wait([report, *outputs]))
        try:
            await asyncio.wait([done, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks: list[asyncio.Task[Any]] = [stdin, report, *outputs, done, gone]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for pipe in (child.stdin, child.stdout, child.stderr):
                pipe.close()
            if not channel.is_closing():
                channel.write_eof()
                channel.close()

    def _spawn(self, session: asyncssh.SSHServerProcess[bytes]) -> subprocess.Popen[bytes]:
        accepted = {
            key: value
            for key, value in session.channel.get_environment().items()
            if key.startswith(_ACCEPTED_ENVIRONMENT)
        }
        command = session.command
        login_name = f"-{Path(self._shell).name}"
        return subprocess.Popen(
            [login_name]
            if command is None
            else [self._shell, "-c", command.encode("utf-8", "surrogateescape")],
            executable=self._shell,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**self._session_environment, **accepted},
            cwd=self._session_environment["HOME"],
            start_new_session=True,
        )


def _when_ended(child: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """A future of the exit status. A thread waits: the child outlives the session, and must be reaped even then."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def settle(returncode: int) -> None:
        if not ended.done():
            ended.set_result(returncode)

    def wait() -> None:
        returncode = child.wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, returncode)

    threading.Thread(target=wait, daemon=True, name=f"wait for {child.pid}").start()
    return ended


async def _report_end(channel: SshdChannel, ended: asyncio.Future[int]) -> None:
    channel.report_end(await ended)


async def _forward_input(source: asyncssh.SSHReader[bytes], pipe: IO[bytes], group: int) -> None:
    """Copy the client's input to the command until its end; once nobody reads it, throw it away.

    Signals that the client sends are read from the same queue and go to the command's process group.
    """
    while True:
        try:
            data = await source.read(_CHUNK_BYTES)
        except asyncssh.SignalReceived as received:
            _send_signal(group, received.signal)
            continue
        except (asyncssh.BreakReceived, asyncssh.TerminalSizeChanged):
            continue
        if not data:
            pipe.close()
            if source.at_eof():
                return
        elif not pipe.closed:
            try:
                await _write_all(pipe.fileno(), data)
            except BrokenPipeError:
                pipe.close()


async def _forward_output(pipe: int, destination: asyncssh.SSHWriter[bytes]) -> None:
    while data := await _read(pipe):
        destination.write(data)
        await destination.drain()


def _send_signal(group: int, name: str) -> None:
    number = getattr(signal, f"SIG{name}", None)
    if number is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)


async def _read(fd: int) -> bytes:
    while True:
        try:
            return os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            await _ready(fd, asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader)


async def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            await _ready(fd, asyncio.get_running_loop().add_writer, asyncio.get_running_loop().remove_writer)


async def _ready(fd: int, add: Callable[..., object], remove: Callable[[int], object]) -> None:
    waiter = asyncio.Event()
    add(fd, waiter.set)
    try:
        await waiter.wait()
    finally:
        remove(fd)
