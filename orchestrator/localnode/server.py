"""The node's SSH server: what OpenSSH's sshd does for one user without a terminal, on loopback only.

Login by public key alone. ``exec`` runs the command string by the login shell, as sshd does; ``sftp`` serves files.
Run as ``python -m orchestrator.localnode.server STATE OPTIONS READY_FD``; :mod:`orchestrator.localnode.node` does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import asyncssh

from orchestrator.desk_account import user_name
from orchestrator.localnode import layout, process
from orchestrator.localnode.latency import delayed
from orchestrator.localnode.session import ExecSession, SshdChannel

ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class ServerOptions:
    """Limits and faults of the server; all off by default.

    ``max_sessions``: open sessions per connection (sshd: MaxSessions). ``max_startups``: connections that have not
    logged in yet (sshd: MaxStartups). ``latency_s``: delay added to each direction. ``shell``: the login shell.
    """

    max_sessions: int | None = None
    max_startups: int | None = None
    latency_s: float = 0.0
    shell: str = "/bin/sh"


@dataclass
class _Server:
    """What all connections share."""

    state: Path
    options: ServerOptions
    user: str
    startups: int = 0


class _ConnectionHandler(asyncssh.SSHServer):
    """One connection: who may log in, and how many sessions it may open."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._connection: asyncssh.SSHServerConnection | None = None
        self._starting = False
        self._sessions = 0

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        limit = self._server.options.max_startups
        if limit is not None and self._server.startups >= limit:
            conn.abort()
            return
        self._server.startups += 1
        self._starting = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._started()

    def begin_auth(self, username: str) -> bool:
        # Read at each login, as sshd does. An unknown user is asked for a key like any other and has none.
        if username == self._server.user and self._connection is not None:
            keys = self._server.state / layout.AUTHORIZED_KEYS
            self._connection.set_authorized_keys(asyncssh.read_authorized_keys(str(keys)))
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def auth_completed(self) -> None:
        self._started()

    def session_requested(self) -> tuple[SshdChannel, ExecSession] | bool:
        limit = self._server.options.max_sessions
        if self._connection is None or (limit is not None and self._sessions >= limit):
            return False
        self._sessions += 1
        channel = SshdChannel(self._connection)
        return channel, ExecSession(self._environment(), self._server.options.shell, self._session_ended)

    def _session_ended(self) -> None:
        self._sessions -= 1

    def _started(self) -> None:
        if self._starting:
            self._starting = False
            self._server.startups -= 1

    def _environment(self) -> dict[str, str]:
        """What sshd gives a session: who and where, a PATH, and nothing of the environment it was started in."""
        assert self._connection is not None
        client_address, client_port = self._connection.get_extra_info("peername")[:2]
        server_address, server_port = self._connection.get_extra_info("sockname")[:2]
        state = self._server.state
        return {
            "HOME": str(state / layout.HOME),
            "USER": self._server.user,
            "LOGNAME": self._server.user,
            "SHELL": self._server.options.shell,
            "PATH": f"{(state / layout.PCT).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "SSH_CLIENT": f"{client_address} {client_port} {server_port}",
            "SSH_CONNECTION": f"{client_address} {client_port} {server_address} {server_port}",
        }


async def serve(state: Path, options: ServerOptions, preferred_port: int, ready_fd: int) -> None:
    """Serve until SIGTERM. Writes the server's record and then its port to ``ready_fd``, as a line."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    server = _Server(state, options, user_name())
    listener = await _listen(server, preferred_port)
    front = await delayed(ADDRESS, listener.get_port(), options.latency_s) if options.latency_s else None
    port = front.port if front else listener.get_port()
    _write_record(state, port)
    os.write(ready_fd, b"%d\n" % port)
    os.close(ready_fd)
    logging.info("listening on %s:%d", ADDRESS, port)
    await stop.wait()
    logging.info("stopping")
    if front:
        front.close()
    listener.close()
    (state / layout.SERVER_RECORD).unlink(missing_ok=True)


async def _listen(server: _Server, preferred_port: int) -> asyncssh.SSHAcceptor:
    """Listen on the port of last time, so that known_hosts stays true; on any free one where that is taken."""

    async def listen(port: int) -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            ADDRESS,
            port,
            server_factory=lambda: _ConnectionHandler(server),
            server_host_keys=[str(server.state / layout.HOST_KEY)],
            public_key_auth=True,
            password_auth=False,
            kbdint_auth=False,
            host_based_auth=False,
            gss_host=None,
            allow_pty=False,
            agent_forwarding=False,
            x11_forwarding=False,
            compression_algs=None,
            backlog=128,
        )

    try:
        return await listen(preferred_port)
    except OSError:
        return await listen(0)


def _write_record(state: Path, port: int) -> None:
    record = state / layout.SERVER_RECORD
    temporary = record.with_suffix(".tmp")
    temporary.write_text(json.dumps({"process": process.identity(os.getpid()), "port": port}))
    temporary.replace(record)


def encode_options(options: ServerOptions) -> str:
    return json.dumps(asdict(options))


def main(arguments: list[str]) -> None:
    state, options, preferred_port, ready_fd = arguments
    process.daemonize()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    asyncio.run(serve(Path(state), ServerOptions(**json.loads(options)), int(preferred_port), int(ready_fd)))


if __name__ == "__main__":
    main(sys.argv[1:])
