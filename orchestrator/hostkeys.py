"""Host keys, strict on every hop: only what known_hosts names is trusted, and never a key that it revokes.

Fabric sets AutoAddPolicy and reads no known_hosts; both are undone here. paramiko knows no markers and stops at a
line that it cannot parse, and adds a line in a time that grows with all before it: so the files are read here.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass

import fabric
import paramiko
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey

from orchestrator.desk_account import own_path
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
    lines = _read(known_hosts)
    revoked = {
        entry.key.get_base64() for line in lines if line.marker == "@revoked" for entry in line.entry()
    }
    for hop in hops(connection):
        name = hop.host if hop.port == paramiko.config.SSH_PORT else f"[{hop.host}]:{hop.port}"
        for line in lines:
            # Only what names the hop is parsed: a grown file has thousands of lines, and this is done at each command.
            for entry in line.entry() if not line.marker and line.names(name) else ():
                if entry.key.get_base64() not in revoked:
                    hop.client.get_host_keys().add(name, entry.key.get_name(), entry.key)
        hop.client.set_missing_host_key_policy(_RefuseOthers(revoked))


def hops(connection: fabric.Connection) -> Iterator[fabric.Connection]:
    """The connection and every jump host before it, the last hop first."""
    hop: object = connection
    while isinstance(hop, fabric.Connection):
        yield hop
        hop = hop.gateway


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


@dataclass(frozen=True)
class _Line:
    """A line of known_hosts: its marker (``@revoked``, or nothing), the hosts that it is for, and their key."""

    marker: str
    hosts: str
    key: str

    def names(self, host: str) -> bool:
        """Whether it is for ``host``, which it may name plainly or by its hash."""
        return any(
            _is_hash_of(name, host) if name.startswith("|1|") else name == host
            for name in self.hosts.split(",")
        )

    def entry(self) -> Iterator[HostKeyEntry]:
        """The line as paramiko reads it; nothing where it cannot."""
        with contextlib.suppress(InvalidHostKey, paramiko.SSHException, ValueError):
            entry = HostKeyEntry.from_line(f"{self.hosts} {self.key}")
            if entry is not None:
                yield entry


def _read(known_hosts: str | None) -> list[_Line]:
    """The lines of ``known_hosts``, or of those of ssh's own files that are there.

    Certificate authorities are not supported, so such a line trusts nothing.
    """
    lines = []
    for name in (known_hosts,) if known_hosts else DEFAULT_KNOWN_HOSTS:
        try:
            text = own_path(name).read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError, UsageError) as error:
            if not known_hosts:
                continue
            if isinstance(error, UsageError):
                raise UsageError(f"known_hosts file {error.message}", error.hint) from None
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"known_hosts file {name} cannot be read: {why}.") from None
        for fields in map(str.split, text.splitlines()):
            marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
            if len(fields) >= 3 and not fields[0].startswith("#"):
                lines.append(_Line(marker, fields[0], f"{fields[1]} {fields[2]}"))
    return lines


def _is_hash_of(hashed: str, host: str) -> bool:
    """Whether ``|1|salt|hash`` stands for ``host``: HMAC-SHA1 with the salt as its key (sshd(8))."""
    try:
        salt, digest = (
            base64.b64decode(part, validate=True) for part in hashed.removeprefix("|1|").split("|")
        )
        return hmac.compare_digest(hmac.digest(salt, host.encode(), "sha1"), digest)
    except ValueError:
        return False


def _bare(hostname: str) -> str:
    """``[name]:port`` and ``name`` as ``name``."""
    return hostname[1:].split("]")[0] if hostname.startswith("[") else hostname
