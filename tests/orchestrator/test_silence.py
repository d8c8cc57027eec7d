"""A host, or a jump host, may fall silent at any moment: each has its deadline, and none hangs the desk."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncssh
import paramiko
import pytest

from orchestrator.connection import Connection
from orchestrator.errors import LinkLost, TransportError
from orchestrator.settings import HostSettings


class Silent(paramiko.ServerInterface):
    """Answers everything until ``moment`` and nothing from then on, not even whether it lives."""

    def __init__(self, moment: str, over: threading.Event) -> None:
        self._moment = moment
        self._over = over

    def _at(self, moment: str) -> None:
        if moment == self._moment:
            self._over.wait(30)

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self._at("auth")
        return paramiko.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        self._at("session")
        return paramiko.OPEN_SUCCEEDED

    def check_channel_direct_tcpip_request(
        self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]
    ) -> int:
        self._at("direct-tcpip")
        return paramiko.OPEN_FAILED_CONNECT_FAILED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self._at("exec")
        return True


SilentHost = Callable[[str], HostSettings]


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[SilentHost]:
    """The settings of a host that listens on loopback and falls silent at a moment."""
    over = threading.Event()
    listeners: list[socket.socket] = []
    host_key, own_key = paramiko.ECDSAKey.generate(), tmp_path / "key"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(own_key))

    def listen(moment: str) -> HostSettings:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        port = listener.getsockname()[1]

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                if moment == "banner":
                    listeners.append(client)
                    continue
                transport = paramiko.Transport(client)
                transport.add_server_key(host_key)
                transport.start_server(threading.Event(), Silent(moment, over))

        threading.Thread(target=serve, daemon=True).start()
        known_hosts = tmp_path / "known_hosts"
        known_hosts.write_text(f"[127.0.0.1]:{port} {host_key.get_name()} {host_key.get_base64()}\n")
        return HostSettings(
            address="127.0.0.1",
            port=port,
            identity_file=str(own_key),
            known_hosts=str(known_hosts),
            connect_timeout_s=1,
            silence_timeout_s=1.5,
        )

    yield listen
    over.set()
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("moment", ["banner", "auth", "session", "exec"])
def test_a_host_that_falls_silent_at_any_moment_of_a_command_is_given_up_in_time(
    silent: SilentHost, moment: str
) -> None:
    began = time.monotonic()
    with Connection("lab", silent(moment)) as connection, pytest.raises(TransportError, match="lab"):
        connection.run(["true"])
    assert time.monotonic() - began < 8


def test_a_host_that_never_begins_a_command_is_silent(silent: SilentHost) -> None:
    with (
        Connection("lab", silent("exec")) as connection,
        pytest.raises(LinkLost, match=r"lab fell silent during a command: no sign of life for [12] s"),
    ):
        connection.run(["true"])


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"timeout_s": 0.5}, "did not end within"),
        ({"idle_timeout_s": 0.5}, "sent nothing for"),
        ({"timeout_s": 60, "idle_timeout_s": 0.5}, "sent nothing for"),
    ],
)
def test_a_commands_deadlines_hold_before_the_host_has_begun_it(
    silent: SilentHost, limits: dict[str, float], words: str
) -> None:
    patient = dataclasses.replace(silent("exec"), silence_timeout_s=60)
    began = time.monotonic()
    with Connection("lab", patient) as connection, pytest.raises(TransportError, match=words):
        connection.run(["true"], **limits)  # type: ignore[arg-type]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("moment", ["banner", "auth", "direct-tcpip"])
def test_a_jump_host_that_falls_silent_is_given_up_in_time(
    silent: SilentHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    gate = silent(moment)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(
        f"Host gate\n HostName 127.0.0.1\n Port {gate.port}\n User keeper\n IdentityFile {gate.identity_file}\n"
        "Host inside\n HostName 127.0.0.1\n Port 9\n ProxyJump gate\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    inside = dataclasses.replace(gate, address="inside", port=None)
    began = time.monotonic()
    with Connection("lab", inside) as connection, pytest.raises(TransportError) as raised:
        connection.run(["true"])
    assert time.monotonic() - began < 5
    assert f"127.0.0.1:9 by way of keeper@127.0.0.1:{gate.port}" in raised.value.message
    assert "no answer in time" in raised.value.message


def test_no_thread_is_left_of_connections_that_failed(silent: SilentHost) -> None:
    def watchers() -> set[threading.Thread]:
        return {
            t for t in threading.enumerate() if t.name.startswith(("asking for", "watching for", "stdin to"))
        }

    before = watchers()
    for moment in ("auth", "exec"):
        with Connection("lab", silent(moment)) as connection, pytest.raises(TransportError):
            connection.run(["true"], timeout_s=0.5)
    deadline = time.monotonic() + 5
    while watchers() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not watchers() - before
