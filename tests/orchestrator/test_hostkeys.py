"""known_hosts: which lines count for which host, and that only those are looked into."""

from __future__ import annotations

import base64
import hashlib
import hmac
from pathlib import Path
from typing import Any

import asyncssh
import fabric
import paramiko
import pytest
from paramiko.hostkeys import HostKeyEntry

from orchestrator.errors import UsageError
from orchestrator.hostkeys import _RefuseOthers, trust_only_known_hosts


def new_key() -> str:
    """A public key as a line of known_hosts has it, without a comment."""
    public = asyncssh.generate_private_key("ssh-ed25519").export_public_key("openssh").decode()
    return " ".join(public.split()[:2])


KEYS = [new_key() for _ in range(4)]


def hashed(host: str, salt: bytes = b"salt" * 5) -> str:
    """A host's name as OpenSSH hashes it."""
    digest = hmac.new(salt, host.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def trusted(text: str, tmp_path: Path, host: str = "lab", port: int = 22) -> tuple[set[str], set[str]]:
    """The keys that count for a host with this known_hosts, and those that it revokes, in base64."""
    (tmp_path / "known_hosts").write_text(text)
    connection = fabric.Connection(host, port=port, config=fabric.Config(lazy=True))
    trust_only_known_hosts(connection, str(tmp_path / "known_hosts"))
    keys: Any = connection.client.get_host_keys()
    policy = connection.client._policy
    assert isinstance(policy, _RefuseOthers)
    found = keys.lookup(host if port == 22 else f"[{host}]:{port}") or {}
    return {key.get_base64() for key in found.values()}, policy._revoked


@pytest.mark.parametrize(
    ("hosts", "host", "port"),
    [
        ("lab", "lab", 22),
        ("other,lab,10.0.0.1", "lab", 22),
        ("[lab]:2222", "lab", 2222),
        (hashed("lab"), "lab", 22),
        (f"other,{hashed('[lab]:2222')}", "lab", 2222),
        ("  lab", "lab", 22),
    ],
)
def test_a_line_counts_for_the_hosts_that_it_names_plainly_or_by_hash(
    tmp_path: Path, hosts: str, host: str, port: int
) -> None:
    assert trusted(f"{hosts}\t {KEYS[0]} a comment\n", tmp_path, host, port)[0] == {KEYS[0].split()[1]}


@pytest.mark.parametrize(
    "hosts",
    [
        *(
            "labs",
            "LAB.example",
            "[lab]:2222",
            hashed("labs"),
            hashed("[lab]:22"),
            "#lab",
            "@cert-authority lab",
        ),
        *("|1|", "|1||", "|1|x|y", "|1|AAAA|AAAA", "|1|lab|lab|lab", "|2|lab", "*", "l?b", ","),
    ],
)
def test_a_line_that_names_other_hosts_or_is_broken_does_not_count(tmp_path: Path, hosts: str) -> None:
    assert trusted(f"{hosts} {KEYS[0]}\n", tmp_path) == (set(), set())


def test_a_key_that_is_revoked_anywhere_counts_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoked = KEYS[0].split()[1]
    assert trusted(f"lab {KEYS[0]}\n@revoked * {KEYS[0]}\n", tmp_path) == (set(), {revoked})
    (tmp_path / "mine").write_text(f"lab {KEYS[0]}\n")
    (tmp_path / "everyones").write_text(f"@revoked other {KEYS[0]}\n")
    files = (str(tmp_path / "mine"), str(tmp_path / "everyones"))
    monkeypatch.setattr("orchestrator.hostkeys.DEFAULT_KNOWN_HOSTS", files)
    connection = fabric.Connection("lab", config=fabric.Config(lazy=True))
    trust_only_known_hosts(connection, None)
    assert connection.client.get_host_keys().lookup("lab") is None


def test_only_the_lines_for_the_host_and_the_revoked_ones_of_a_large_file_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To parse a line, and to add it to those before it, costs a time that thousands of lines multiply."""
    many = [f"{name} {KEYS[1]}" for n in range(2000) for name in (f"host{n}", hashed(f"hashed{n}"))]
    lines = [*many, f"lab {KEYS[0]}", f"@revoked * {KEYS[2]}", f"{hashed('lab')} {KEYS[0]}"]
    parsed: list[str] = []
    parse = HostKeyEntry.from_line

    def count(line: str, *rest: object) -> object:
        parsed.append(line)
        return parse(line, *rest)

    monkeypatch.setattr(HostKeyEntry, "from_line", count)
    assert trusted("\n".join(lines), tmp_path) == ({KEYS[0].split()[1]}, {KEYS[2].split()[1]})
    assert len(parsed) == 3


@pytest.mark.parametrize("name", ["~nosuch/known_hosts", "~nosuch", "a\0b", "none/known_hosts", "/"])
def test_a_file_that_was_named_and_cannot_be_read_is_a_usage_error(name: str) -> None:
    connection = fabric.Connection("lab", config=fabric.Config(lazy=True))
    with pytest.raises(UsageError, match="known_hosts"):
        trust_only_known_hosts(connection, name)
    assert isinstance(connection.client, paramiko.SSHClient)
