"""One SSH connection: any argv and any bytes arrive as they are; every way of not getting through has its own words."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import asyncssh
import paramiko
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paramiko.common import (
    MSG_CHANNEL_CLOSE,
    MSG_CHANNEL_DATA,
    MSG_CHANNEL_EOF,
    MSG_CHANNEL_WINDOW_ADJUST,
)

from orchestrator.command import quote
from orchestrator.connection import Connection
from orchestrator.errors import LinkLost, TransportError, UsageError
from orchestrator.inventory import Destination, load_inventory, resolve
from orchestrator.localnode import node
from orchestrator.localnode.server import ServerOptions
from orchestrator.settings import HostSettings
from tests.faulty_link import FaultyLink

ECHO_ARGUMENTS = "import json, os, sys; print(json.dumps([list(os.fsencode(a)) for a in sys.argv[1:]]))"

awkward = st.sampled_from(
    ["", "-", "--", "-rf", "'", '"', "$HOME", "`id`", "\\", "\n", "a\nb", "*", "~", "#", "!", "é", " "]
)
arguments = st.one_of(
    awkward.map(os.fsencode),
    st.binary(max_size=40).map(lambda data: data.replace(b"\0", b"")),
    st.text(max_size=40).map(lambda text: text.replace("\0", "").encode("utf-8", errors="ignore")),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(arguments, max_size=6))
def test_any_argv_arrives_byte_exact(shared: Connection, argv: list[bytes]) -> None:
    done = shared.run([sys.executable, "-S", "-c", ECHO_ARGUMENTS, *argv])
    assert done.exit_status == 0, done.stderr
    assert [bytes(argument) for argument in json.loads(done.stdout)] == argv


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=300_000))
def test_any_bytes_on_stdin_come_back_on_stdout(shared: Connection, data: bytes) -> None:
    assert shared.run(["cat"], stdin=data).stdout == data


def test_output_that_is_no_text_stays_bytes(connection: Connection) -> None:
    data = bytes(range(256)) * 500
    assert connection.run(["cat"], stdin=data).stdout == data


def test_five_megabytes_of_json_on_stdin_arrive_whole(connection: Connection) -> None:
    value = {"arguments": [f"argument {number} \"'$\\\n" for number in range(250_000)]}
    text = json.dumps(value).encode()
    assert len(text) > 5_000_000
    program = "import json, sys; print(len(json.load(sys.stdin)['arguments']))"
    assert connection.run([sys.executable, "-S", "-c", program], stdin=text).stdout.split() == [b"250000"]


def test_stdout_and_stderr_do_not_mix_and_do_not_block_each_other(connection: Connection) -> None:
    program = "import sys; sys.stderr.write('e' * 3_000_000); sys.stdout.write('o' * 3_000_000); sys.exit(7)"
    done = connection.run([sys.executable, "-S", "-c", program], timeout_s=30)
    assert (done.exit_status, len(done.stdout)) == (7, 3_000_000)
    assert set(done.stderr) == {ord("e")}


def test_a_command_that_reads_no_stdin_may_end_before_it_is_sent(connection: Connection) -> None:
    assert connection.run(["true"], stdin=bytes(20_000_000), timeout_s=30).exit_status == 0


def test_a_command_without_stdin_sees_its_end_at_once(connection: Connection) -> None:
    assert connection.run(["cat"], timeout_s=10).stdout == b""


@pytest.mark.parametrize(
    ("limit", "words"), [("timeout_s", "did not end within"), ("idle_timeout_s", "sent nothing for")]
)
def test_a_silent_command_is_given_up_at_its_deadline(connection: Connection, limit: str, words: str) -> None:
    started = time.monotonic()
    with pytest.raises(TransportError, match=words) as raised:
        connection.run(["sleep", "60"], **{limit: 0.5})  # type: ignore[arg-type]
    assert time.monotonic() - started < 10
    assert raised.value.exit_status == 3
    assert connection.run(["echo", "again"]).stdout == b"again\n"


def test_a_command_that_is_sent_its_input_slowly_is_not_idle(connection: Connection) -> None:
    def slowly() -> Iterator[bytes]:
        for _ in range(8):
            time.sleep(0.25)
            yield bytes(1000)

    done = connection.run(["wc", "-c"], stdin=slowly(), idle_timeout_s=1)
    assert done.stdout.split() == [b"8000"]


def test_a_nul_and_an_empty_argv_are_refused() -> None:
    with pytest.raises(UsageError, match="NUL"):
        quote(["echo", "a\0b"])
    with pytest.raises(UsageError, match="empty"):
        quote([])


@pytest.mark.parametrize("word", ["/root\ud800", "\udfff", "HOME=a\udc00b"])
def test_an_argument_that_no_bytes_stand_for_is_refused_in_words(word: str) -> None:
    with pytest.raises(UsageError, match="no text that can be sent"):
        quote(["env", word])
    assert quote(["cat", "not UTF-8 \udcff"]) == b"cat 'not UTF-8 \xff'"


def test_a_source_of_input_that_fails_ends_the_command_and_is_told(connection: Connection) -> None:
    def failing(error: Exception) -> Iterator[bytes]:
        yield b"begun"
        raise error

    with pytest.raises(UsageError, match="could not be read: gone"):
        connection.run(["cat"], stdin=failing(OSError("gone")), timeout_s=20)
    with pytest.raises(UnicodeEncodeError):
        connection.run(["cat"], stdin=failing(UnicodeEncodeError("utf-8", "x", 0, 1, "no")), timeout_s=20)


def test_a_host_where_nothing_listens_is_unreachable_and_says_so() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    waits: list[str] = []
    host = HostSettings(address="127.0.0.1", port=port)
    with pytest.raises(TransportError, match="no SSH connection to root@127") as raised:
        Connection("lab", host, waits.append).run(["true"])
    assert "refused" in raised.value.message
    assert raised.value.exit_status == 3
    assert len(waits) == 2


def test_an_unknown_host_key_is_refused_with_its_fingerprint_and_the_command_to_accept_it(
    destination: Destination, tmp_path: Path
) -> None:
    (tmp_path / "known_hosts").write_text("")
    host = replace(destination.host, known_hosts=str(tmp_path / "known_hosts"))
    with pytest.raises(TransportError, match="is not known: ssh-ed25519 SHA256:") as raised:
        Connection("local", host).run(["true"])
    assert f"ssh-keyscan -p {host.port} 127.0.0.1" in raised.value.hint
    assert (tmp_path / "known_hosts").read_text() == ""


def test_a_changed_host_key_is_refused_with_both_fingerprints(
    destination: Destination, tmp_path: Path
) -> None:
    other = asyncssh.generate_private_key("ssh-ed25519").export_public_key("openssh").decode()
    known_hosts = tmp_path / "known_hosts"
    known_hosts.write_text(f"[127.0.0.1]:{destination.host.port} {other}")
    host = replace(destination.host, known_hosts=str(known_hosts))
    with pytest.raises(TransportError, match="has CHANGED") as raised:
        Connection("local", host).run(["true"])
    assert raised.value.message.count("SHA256:") == 2
    assert f"ssh-keygen -f {known_hosts} -R '[127.0.0.1]:{destination.host.port}'" in raised.value.hint


def test_a_revoked_key_is_refused_even_when_it_is_listed_as_well(
    destination: Destination, tmp_path: Path
) -> None:
    assert destination.host.known_hosts is not None
    listed = Path(destination.host.known_hosts).read_text()
    (tmp_path / "known_hosts").write_text(f"{listed}@revoked {listed}")
    host = replace(destination.host, known_hosts=str(tmp_path / "known_hosts"))
    with pytest.raises(TransportError, match="is REVOKED"):
        Connection("local", host).run(["true"])


@pytest.mark.parametrize(
    "line",
    [
        b"@revoked [127.0.0.1]:22 ssh-ed25519 AAAA",
        b"@cert-authority *.example ssh-rsa AAAAB3",
        b"some host with too many words in it",
        b"host ssh-ed25519 not-base64!",
        b"\xff\xfe\x00",
        b"# a comment",
        b"",
    ],
)
def test_a_line_of_known_hosts_that_cannot_be_used_costs_only_itself(
    destination: Destination, tmp_path: Path, line: bytes
) -> None:
    assert destination.host.known_hosts is not None
    listed = Path(destination.host.known_hosts).read_bytes()
    (tmp_path / "known_hosts").write_bytes(line + b"\n" + listed)
    host = replace(destination.host, known_hosts=str(tmp_path / "known_hosts"))
    with Connection("local", host) as connection:
        assert connection.run(["echo", "trusted"]).stdout == b"trusted\n"


@pytest.mark.parametrize(
    "content", [b"", b"no key at all", b"\xff\xfe", b"-----BEGIN OPENSSH PRIVATE KEY-----\nx\n"]
)
def test_a_key_file_that_is_no_key_is_a_usage_error_and_not_the_networks_fault(
    destination: Destination, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "key").write_bytes(content)
    host = replace(destination.host, identity_file=str(tmp_path / "key"))
    with pytest.raises(UsageError, match="no private key that can be read"):
        Connection("local", host).run(["true"])


@pytest.mark.parametrize("address", ["me@127.0.0.1", "a..b", "x" * 70])
def test_an_address_that_is_none_is_a_usage_error(address: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be used|is not a host's name"):
        Connection("lab", HostSettings(address=address)).run(["true"])


@pytest.mark.parametrize("content", [b"Host x\n  Port =\n  =\nBroken", b"\xff\xfe\x00"])
def test_an_ssh_config_that_cannot_be_read_is_a_usage_error(
    destination: Destination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_bytes(content)
    (tmp_path / ".fabric.yml").write_text("{ not: yaml")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match="ssh_config"):
        Connection("local", destination.host).run(["true"])


def test_a_person_without_any_key_is_told_at_once(
    destination: Destination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    host = replace(destination.host, identity_file=None)
    waits: list[str] = []
    with pytest.raises(TransportError, match="accepts none of your keys") as raised:
        Connection("lab", host, waits.append).run(["true"])
    assert "ssh-copy-id" in raised.value.hint
    assert not waits


def test_a_key_that_the_host_does_not_accept_is_named_as_the_reason(
    destination: Destination, tmp_path: Path
) -> None:
    key = tmp_path / "stranger"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(key))
    host = replace(destination.host, identity_file=str(key))
    with pytest.raises(TransportError, match="accepts none of your keys") as raised:
        Connection("local", host).run(["true"])
    assert "ssh-copy-id" in raised.value.hint


@pytest.mark.parametrize("name", ["{tmp_path}/none", "~nosuch/key", "~nosuch", "a\0b"])
def test_a_key_file_that_is_not_there_is_a_usage_error(
    destination: Destination, tmp_path: Path, name: str
) -> None:
    host = replace(destination.host, identity_file=name.format(tmp_path=tmp_path))
    with pytest.raises(UsageError, match=r"identity_file|no such home folder"):
        Connection("local", host).run(["true"])


def test_a_connection_that_died_between_commands_is_opened_anew(connection: Connection) -> None:
    assert connection.run(["echo", "one"]).stdout == b"one\n"
    opened = connection._fabric
    assert opened is not None
    opened.transport.sock.shutdown(socket.SHUT_RDWR)
    time.sleep(0.2)
    assert connection.run(["echo", "two"]).stdout == b"two\n"


def test_a_link_that_breaks_during_a_command_is_a_transport_error_and_never_a_result(
    connection: Connection,
) -> None:
    def cut(data: bytes) -> None:
        assert connection._fabric is not None
        connection._fabric.transport.sock.shutdown(socket.SHUT_RDWR)

    with pytest.raises(TransportError, match="The link to local"):
        connection.run(
            [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(30)"], on_stdout=cut
        )


def test_a_host_that_falls_silent_is_noticed_within_its_deadline_though_the_link_stands(
    destination: Destination,
) -> None:
    with FaultyLink(destination.host.port or 22) as link:
        known_hosts = Path(str(destination.host.known_hosts))
        line = known_hosts.read_text().replace(f":{destination.host.port} ", f":{link.port} ")
        known_hosts.write_text(known_hosts.read_text() + line)
        host = replace(destination.host, port=link.port, silence_timeout_s=1.5)
        with Connection("lab", host) as connection:
            began = time.monotonic()
            assert connection.run(["sh", "-c", "sleep 3; echo done"]).stdout == b"done\n", (
                "quiet is not silent"
            )
            with pytest.raises(LinkLost, match="lab fell silent during a command"):
                connection.run(["sh", "-c", "echo begun; sleep 60"], on_stdout=lambda _: link.stall())
    assert time.monotonic() - began < 3 + 4


def test_a_host_that_accepts_and_says_nothing_costs_one_connect_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        host = HostSettings(address="127.0.0.1", port=mute.getsockname()[1], connect_timeout_s=1)
        began = time.monotonic()
        with pytest.raises(TransportError, match="no answer in time"):
            Connection("lab", host).run(["true"])
    assert time.monotonic() - began < 2.5


def test_an_error_of_whoever_takes_the_output_is_not_taken_for_the_links(connection: Connection) -> None:
    def full(data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        connection.run(["echo", "x"], on_stdout=full)


@pytest.fixture(scope="module")
def shared(destination: Destination) -> Connection:
    """One connection for all examples of a property."""
    return Connection("local", destination.host)


def test_threads_share_a_connection_within_the_hosts_limit_of_sessions(tmp_path: Path) -> None:
    info = node.start(tmp_path / "node", options=ServerOptions(max_sessions=10, max_startups=10))
    try:
        host = resolve(load_inventory(info.inventory), "local", "200", info.inventory).host
        with Connection("local", host) as connection, ThreadPoolExecutor(30) as pool:
            said = list(pool.map(lambda number: connection.run(["echo", str(number)]).stdout, range(60)))
    finally:
        node.stop(tmp_path / "node")
    assert said == [f"{number}\n".encode() for number in range(60)]


@pytest.mark.parametrize(
    "kind", [MSG_CHANNEL_WINDOW_ADJUST, MSG_CHANNEL_DATA, MSG_CHANNEL_EOF, MSG_CHANNEL_CLOSE]
)
def test_what_comes_too_late_for_a_channel_does_not_end_the_connection(
    connection: Connection, kind: int
) -> None:
    """A thread that sends a command's input may be overtaken by the command's end."""
    assert connection.run(["true"]).exit_status == 0
    transport = connection._open().transport
    channel = transport.open_session()
    channel.exec_command("true")
    assert channel.recv_exit_status() == 0
    channel.close()
    time.sleep(0.2)
    late = paramiko.Message()
    late.add_byte(bytes([kind]))
    late.add_int(channel.remote_chanid)
    if kind == MSG_CHANNEL_WINDOW_ADJUST:
        late.add_int(1)
    if kind == MSG_CHANNEL_DATA:
        late.add_string(b"late")
    transport._send_user_message(late)
    time.sleep(0.2)
    assert connection.run(["echo", "on"]).stdout == b"on\n"
    assert connection._open().transport is transport


def test_input_after_its_end_does_not_end_the_connection(connection: Connection) -> None:
    transport = connection._open().transport
    channel = transport.open_session()
    channel.exec_command("cat")
    channel.shutdown_write()
    late = paramiko.Message()
    late.add_byte(bytes([MSG_CHANNEL_DATA]))
    late.add_int(channel.remote_chanid)
    late.add_string(b"late")
    transport._send_user_message(late)
    assert channel.recv_exit_status() == 0
    assert connection.run(["echo", "on"]).stdout == b"on\n"
    assert connection._open().transport is transport


def test_a_command_that_ends_while_keys_are_exchanged_does_not_stop_the_exchange(
    connection: Connection,
) -> None:
    """The reader answers the end of a channel, and must not wait for what only it can finish."""
    transport = connection._open().transport
    ending, going_on = transport.open_session(), transport.open_session()
    ending.exec_command("sleep 0.3")
    going_on.exec_command("sleep 1; echo on; cat")
    transport.clear_to_send.clear()
    try:
        deadline = time.monotonic() + 5
        while not going_on.recv_ready() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert going_on.recv_ready(), "the reader does not read on"
    finally:
        transport.clear_to_send.set()
    going_on.shutdown_write()
    assert going_on.recv_exit_status() == 0
    assert connection.run(["echo", "on"]).stdout == b"on\n"
    assert connection._open().transport is transport


def test_a_command_that_is_given_up_leaves_the_others_of_its_connection_alone(connection: Connection) -> None:
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(connection.run, ["sh", "-c", "sleep 2; echo done"])
        time.sleep(0.3)
        with pytest.raises(TransportError, match="did not end within"):
            connection.run(["sleep", "60"], timeout_s=0.5)
        assert other.result(30).stdout == b"done\n"
