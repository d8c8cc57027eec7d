"""Who gets in: the one key for the one user, to a host whose key is known."""

from __future__ import annotations

from pathlib import Path

import asyncssh
import paramiko
import pytest

from tests.orchestrator.localnode.conftest import paramiko_client, run, state_of, with_asyncssh


def test_the_client_key_logs_in_with_either_client(running_node, client):
    assert run(client, "echo in").stdout == b"in\n"

    async def work(connection):
        return (await connection.run("echo in")).stdout

    assert with_asyncssh(running_node, work) == "in\n"


def test_another_key_is_refused(running_node, tmp_path):
    other = tmp_path / "other"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(other))
    with pytest.raises(paramiko.AuthenticationException):
        paramiko_client(running_node, key_filename=str(other))


def test_a_password_is_never_asked_for(running_node):
    with pytest.raises(paramiko.BadAuthenticationType) as refused:
        paramiko_client(running_node, key_filename=None, password="secret")
    assert refused.value.allowed_types == ["publickey"]


def test_keyboard_interactive_is_refused(running_node):
    transport = paramiko.Transport((running_node.address, running_node.port))
    try:
        transport.start_client(timeout=10)
        with pytest.raises(paramiko.BadAuthenticationType):
            transport.auth_interactive(running_node.user, lambda *_: ["secret"])
    finally:
        transport.close()


def test_another_user_is_refused_with_the_right_key(running_node):
    with pytest.raises(paramiko.AuthenticationException):
        paramiko_client(running_node, username="somebody-else")


def test_a_key_that_is_taken_out_of_authorized_keys_is_refused_at_the_next_login(fresh_node):
    info = fresh_node()
    paramiko_client(info).close()
    (state_of(info) / "etc/authorized_keys").write_text("")
    with pytest.raises(paramiko.AuthenticationException):
        paramiko_client(info)


def test_a_strict_client_refuses_a_host_key_that_is_not_the_known_one(running_node, tmp_path):
    known = tmp_path / "known_hosts"
    stranger = asyncssh.generate_private_key("ssh-ed25519").export_public_key("openssh").decode()
    known.write_text(f"[{running_node.address}]:{running_node.port} {stranger}")
    with pytest.raises(paramiko.BadHostKeyException):
        paramiko_client(running_node, known_hosts=known)


def test_a_strict_client_refuses_a_host_that_it_does_not_know(running_node, tmp_path):
    known = tmp_path / "known_hosts"
    known.write_text("")
    with pytest.raises(paramiko.SSHException, match="not found in known_hosts"):
        paramiko_client(running_node, known_hosts=known)


@pytest.mark.parametrize("name", ["client_key", "etc/host_key", "etc/authorized_keys", "inventory.yaml"])
def test_keys_and_inventory_are_readable_by_their_owner_only(running_node, name):
    assert (state_of(running_node) / name).stat().st_mode & 0o777 == 0o600
    assert state_of(running_node).stat().st_mode & 0o777 == 0o700


def test_the_server_listens_on_loopback_only(running_node):
    wanted = f":{running_node.port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    assert [row[1] for row in rows if row[3] == "0A" and row[1].endswith(wanted)] == [f"0100007F{wanted}"]
