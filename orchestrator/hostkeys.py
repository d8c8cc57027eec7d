"""Host keys, strict on every hop: only what known_hosts names is trusted, and never a key that it revokes.

Fabric sets AutoAddPolicy and reads no known_hosts; both are undone here. paramiko knows no markers and stops at a
line that it cannot parse, so the files are read line by line.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import fabric
import paramiko
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey

from orchestrator.errors import TransportError, UsageError

DEFAULT_KNOWN_HOSTS = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")


class HostKeyRefused(paramiko.SSHException):
    """The host offers a key that known_hosts does not name, or revokes."""

    def __init__(self, hostname: str, key: paramiko.PKey, *, revoked: bool) -> None:
        super().__init__(f"{'revoked' if revoked else 'unknown'} host key of {hostname}")
        self.hostname = hostname
        self.key = key
        self.revoked = revoked


class _RefuseOthers(paramiko.MissingHostKeyPolicy):
    def __init__(self, revoked: set[str]) -> None:
        self._revoked = revoked

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise HostKeyRefused(hostname, key, revoked=key.get_base64() in self._revoked)


def trust_only_known_hosts(connection: fabric.Connection, known_hosts: str | None) -> None:
    """Make the connection and every jump host before it accept only keys of ``known_hosts`` (default: ssh's own files).

    Raises :class:`UsageError` when a file that was named cannot be read.
    """
    for hop in _hops(connection):
        revoked: set[str] = set()
        for name in (known_hosts,) if known_hosts else DEFAULT_KNOWN_HOSTS:
            path = Path(name).expanduser()
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError as error:
                if known_hosts:
                    raise UsageError(f"known_hosts file {path} cannot be read: {error.strerror}.") from None
                continue
            revoked |= _load(hop.client.get_host_keys(), text)
        hop.client.set_missing_host_key_policy(_RefuseOthers(revoked))


def unknown_key_error(name: str, error: HostKeyRefused, port: int, known_hosts: str | None) -> TransportError:
    """What a person is told of a key that is not known, or revoked."""
    shown = f"{error.key.get_name()} {fingerprint(error.key)}"
    if error.revoked:
        return TransportError(
            f"{name}: the host key of {error.hostname} is REVOKED in known_hosts: {shown}.",
            "Whoever holds that key may pose as the host. Make a new key on the host, and accept that.",
        )
    return TransportError(
        f"{name}: the host key of {error.hostname} is not known: {shown}.",
        "Compare it with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the host's console; to accept it: "
        f"ssh-keyscan -p {port} {_bare(error.hostname)} >> {known_hosts or DEFAULT_KNOWN_HOSTS[0]}",
    )


def changed_key_error(
    name: str, error: paramiko.BadHostKeyException, port: int, known_hosts: str | None
) -> TransportError:
    """What a person is told of a key that is not the one in known_hosts."""
    bare = _bare(error.hostname)
    entry = bare if port == 22 else f"[{bare}]:{port}"
    # Named, since ssh-keygen goes by the account's home and not by $HOME.
    file = known_hosts or DEFAULT_KNOWN_HOSTS[0]
    return TransportError(
        f"{name}: the host key of {entry} has CHANGED: it now offers {error.key.get_name()} "
        f"{fingerprint(error.key)}, known_hosts says {fingerprint(error.expected_key)}.",
        f"Another machine may be answering. When you know why it changed: ssh-keygen -f {file} -R '{entry}'",
    )


def fingerprint(key: paramiko.PKey) -> str:
    """The key's fingerprint as OpenSSH prints it."""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def _load(keys: paramiko.HostKeys, text: str) -> set[str]:
    """Add what ``text`` names to ``keys``, and return the keys that it revokes, in base64.

    Certificate authorities are not supported, so such a line trusts nothing; nor does one that cannot be parsed.
    """
    entries, revoked = [], set()
    for number, line in enumerate(text.splitlines(), 1):
        marker, _, rest = (
            line.strip().partition(" ") if line.lstrip().startswith("@") else ("", "", line.strip())
        )
        with contextlib.suppress(InvalidHostKey, paramiko.SSHException, ValueError):
            entry = (
                HostKeyEntry.from_line(rest.strip(), number) if rest and not rest.startswith("#") else None
            )
            if entry is not None and marker == "@revoked":
                revoked.add(entry.key.get_base64())
            elif entry is not None and not marker:
                entries.append(entry)
    for entry in entries:
        if entry.key.get_base64() not in revoked:
            for hostname in entry.hostnames:
                keys.add(hostname, entry.key.get_name(), entry.key)
    return revoked


def _hops(connection: fabric.Connection) -> Iterator[fabric.Connection]:
    """The connection and every jump host before it."""
    hop: object = connection
    while isinstance(hop, fabric.Connection):
        yield hop
        hop = hop.gateway


def _bare(hostname: str) -> str:
    """``[name]:port`` and ``name`` as ``name``."""
    return hostname[1:].split("]")[0] if hostname.startswith("[") else hostname
