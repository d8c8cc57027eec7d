"""One container: run, upload, download. All that the project knows of ``pct``, quoting and their traps.

- ``pct exec`` replaces itself by the command and passes the argv on as it is, so the only shell is the host's login
  shell and one quoting (in :mod:`orchestrator.connection`) is right.
- Its environment differs between versions and leaks the host's, so every command starts with ``env -i`` and an
  explicit PATH, HOME and LANG.
- Its own failures share exit statuses with commands, and ``pct status`` exits 0 for a stopped container: what an
  exit status means is asked of ``pct status`` in words, and only after something went wrong.
- ``pct push`` may fail with exit 0, truncates in place and holds the container's lock: files travel as a tar stream
  through ``pct exec`` instead, are checked by hash and renamed into place.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from orchestrator.command import BytesSink, Completed
from orchestrator.connection import Connection
from orchestrator.errors import OrchestratorError, RemoteError, TransportError, UsageError
from orchestrator.explanation import explanation
from orchestrator.inventory import Destination
from orchestrator.partial import only_writer
from orchestrator.retry import repeat
from orchestrator.tar_stream import ByteProgress, tar_stream
from payload.agent.checksum import file_sha256
from payload.agent.layout import PARTIAL_PREFIX

PATIENCE_S = 60.0
"""A frozen container says nothing, and neither does pct: what lets so long pass without a byte is given up."""
_PROBE_TIMEOUT_S = 30.0
# What the slowest disk reads, for a command that says nothing before it has read everything.
_LEAST_READ_BYTES_PER_S = 10e6
_HASH_PLAIN_FILES = ("-maxdepth", "0", "-type", "f", "-exec", "sha256sum", "--zero", "--", "{}", "+")
_UNPACK = ("tar", "--extract", "--file=-", "--directory=/", "--no-same-owner", "--touch")


class Container:
    """One container of one host, over one connection."""

    def __init__(
        self, connection: Connection, destination: Destination, *, patience_s: float = PATIENCE_S
    ) -> None:
        """``patience_s``: how long a command may go without a byte, from it or to it, unless it says otherwise."""
        self.patience_s = patience_s
        self.connection = connection
        self.destination = destination
        self.settings = destination.container

    def __str__(self) -> str:
        return str(self.destination)

    def run(
        self,
        argv: Sequence[str | bytes],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        on_stdout: BytesSink | None = None,
        timeout_s: float | None = None,
        idle_timeout_s: float | None = None,
    ) -> Completed:
        """Run ``argv`` in the container as its root, with exactly the environment of the inventory.

        Bounded as :meth:`Connection.run` is; without ``idle_timeout_s`` by the container's patience.
        The exit status may be the command's or ``pct``'s own: callers that need to know check what the command
        left behind, or ask :meth:`explain`. Raises :class:`TransportError`.
        """
        return self.connection.run(
            self._pct("exec", self.destination.container_id, "--", *self._environment(), *argv),
            stdin=stdin,
            on_stdout=on_stdout,
            timeout_s=timeout_s,
            idle_timeout_s=self.patience_s if idle_timeout_s is None else idle_timeout_s,
        )

    def patience_to_read(self, size_bytes: float) -> float:
        """Seconds that a command may say nothing which reads so many bytes first."""
        return self.patience_s + size_bytes / _LEAST_READ_BYTES_PER_S

    def upload(
        self, source: Path | bytes, path: str, *, mode: int = 0o644, on_progress: ByteProgress | None = None
    ) -> None:
        """Write ``source`` to the absolute ``path`` in the container, whole or not at all.

        Folders on the way are made. An existing file is replaced by rename; a folder in the way is an error.
        Raises :class:`RemoteError` when the bytes that arrived are not the bytes that were sent, naming the disk
        when it is full, :class:`UsageError` when ``source`` cannot be read, and :class:`TransportError` when the link
        broke again and again.
        """
        target = PurePosixPath(path)
        # A name of its own length, since the target's may be as long as a name can be; prune knows it by its prefix.
        partial = target.with_name(f"{PARTIAL_PREFIX}{secrets.token_hex(8)}")
        repeat(
            lambda: self._upload(source, path, partial, mode, on_progress),
            f"to send {target.name}",
            self.connection.notify,
        )

    def _upload(
        self,
        source: Path | bytes,
        path: str,
        partial: PurePosixPath,
        mode: int,
        on_progress: ByteProgress | None,
    ) -> None:
        digest = hashlib.sha256()
        size = 0

        def count(done: int, total: int) -> None:
            nonlocal size
            size = done
            if on_progress is not None:
                on_progress(done, total)

        try:
            sent = self.run(_UNPACK, stdin=tar_stream(source, str(partial), mode, digest, count))
            if self.sha256(str(partial), size_bytes=size) != digest.hexdigest():
                raise self.explain(sent, f"{path} did not arrive whole")
            moved = self.run(["mv", "-T", "-f", str(partial), path], timeout_s=_PROBE_TIMEOUT_S)
            if moved.exit_status != 0:
                raise self.explain(moved, f"{path} could not be put in place")
        except (RemoteError, UsageError, KeyboardInterrupt):
            # Where this does not reach it, prune does.
            with contextlib.suppress(TransportError):
                self.run(["rm", "-f", str(partial)], timeout_s=_PROBE_TIMEOUT_S)
            raise

    def send(
        self, source: bytes, path: str, *, mode: int = 0o644, on_progress: ByteProgress | None = None
    ) -> None:
        """Write ``source`` to ``path``, a name that nothing else uses, for a reader that checks it by its hash.

        One command where :meth:`upload` needs three. Raises :class:`RemoteError` when tar could not write it.
        """
        sent = self.run(_UNPACK, stdin=tar_stream(source, path, mode, hashlib.sha256(), on_progress))
        if sent.exit_status != 0:
            self.run(["rm", "-f", path], timeout_s=_PROBE_TIMEOUT_S)
            raise self.explain(sent, f"{path} did not arrive whole")

    def sha256(self, path: str, *, size_bytes: float = 0) -> str | None:
        """The SHA-256 of a regular file in the container in hex; None when it is none, or cannot be read.

        What is no regular file is not opened: a pipe or a device would be read for ever. ``size_bytes``: how large it
        may be, which decides how long it may take.
        """
        done = self.run(["find", path, *_HASH_PLAIN_FILES], idle_timeout_s=self.patience_to_read(size_bytes))
        digest = done.stdout.decode("ascii", errors="replace").split(" ")[0]
        return digest if done.exit_status == 0 and len(digest) == 64 else None

    def sha256_in(self, folder: str, names: Sequence[str], *, size_bytes: float = 0) -> dict[str, str]:
        """The SHA-256 of each plain file ``names`` of a folder, in one command; without those that cannot be read.

        ``size_bytes``: how large they may be together, which decides how long it may take.
        """
        done = self.run(
            ["env", "-C", folder, "find", *(f"./{name}" for name in names), *_HASH_PLAIN_FILES],
            idle_timeout_s=self.patience_to_read(size_bytes),
        )
        lines = done.stdout.decode("utf-8", errors="replace").split("\0")
        return {line[68:]: line[:64] for line in lines if len(line) > 68}

    def download(
        self, path: str, destination: Path, *, size: int, sha256: str, on_progress: ByteProgress | None = None
    ) -> None:
        """Bring the first ``size`` bytes of ``path`` home to ``destination``, whole or not at all.

        A ``.part`` left by an earlier try is continued; while another download of the same makes it, this one waits,
        and takes what that one brought. Raises :class:`RemoteError` when the bytes do not have the hash ``sha256``,
        :class:`UsageError` when the desk cannot write it, and :class:`TransportError` when the link broke again and
        again without a byte in between (what came so far stays in the ``.part``).
        """
        name = destination.name
        partial = destination.with_name(f"{name}.{sha256[:16]}.part")
        try:
            with only_writer(
                partial, lambda: self.connection.notify(f"Another download brings {name}: waiting for it")
            ) as file:
                if _is_whole(destination, size, sha256):
                    partial.unlink()
                    return
                repeat(
                    lambda: self._fetch_rest(path, partial, file, size, on_progress),
                    f"to fetch {name}",
                    self.connection.notify,
                    progress=file.tell,
                )
                os.fsync(file.fileno())
                if file_sha256(partial) != sha256:
                    partial.unlink()
                    raise RemoteError(
                        f"{path} of {self} did not come home whole: its SHA-256 is not {sha256[:16]}….",
                        "The bad copy was removed; fetch again.",
                    )
                partial.replace(destination)
        except OSError as error:
            raise UsageError(
                f"{destination} cannot be written at the desk: {error.strerror or error}.",
                "What came so far is kept; make room or name another folder, then fetch again.",
            ) from error

    def _fetch_rest(
        self, path: str, partial: Path, file: IO[bytes], size: int, on_progress: ByteProgress | None
    ) -> None:
        """Append to ``file``, which is open at ``partial``, what it lacks of the first ``size`` bytes of ``path``."""
        have = file.tell()
        if have > size:
            have = file.seek(0)
            file.truncate()
        elif have == size > 0:
            return

        def write(data: bytes) -> None:
            file.write(data[: max(0, size - file.tell())])
            if on_progress is not None:
                on_progress(file.tell(), size)

        try:
            done = self.run(
                ["tail", f"--bytes=+{have + 1}", "--", path],
                on_stdout=write,
                idle_timeout_s=_PROBE_TIMEOUT_S,
            )
        finally:
            file.flush()
        if done.exit_status != 0:
            partial.unlink()
            raise self.explain(done, f"{path} could not be read")

    def configuration(self) -> dict[str, str] | None:
        """What ``pct config`` says (of a key that stands there twice, the last); None when it says nothing.

        Works on a stopped or frozen container as well. Raises :class:`TransportError`.
        """
        done = self.connection.run(
            self._pct("config", self.destination.container_id), timeout_s=_PROBE_TIMEOUT_S
        )
        if done.exit_status != 0:
            return None
        lines = done.stdout.decode("utf-8", errors="replace").splitlines()
        pairs = (line.partition(":") for line in lines if ":" in line)
        return {key.strip(): value.strip() for key, _, value in pairs}

    def explain(self, done: Completed, what: str) -> OrchestratorError:
        """The error that fits a command that did not do its work, found by asking ``pct`` for the container's state."""
        asked = self._pct("status", self.destination.container_id)
        status = self.connection.run(asked, timeout_s=_PROBE_TIMEOUT_S)
        return explanation(self.destination, done, what, status)

    def _pct(self, verb: str, *rest: str | bytes) -> list[str | bytes]:
        host = self.destination.host
        needs_sudo = host.user != "root" if host.sudo is None else host.sudo
        return [*(["sudo", "-n"] if needs_sudo else []), host.pct, verb, *rest]

    def _environment(self) -> list[str]:
        return [
            "/usr/bin/env",
            "-i",
            f"PATH={':'.join(self.settings.path)}",
            f"HOME={self.settings.home}",
            "LANG=C.UTF-8",
        ]


def _is_whole(path: Path, size: int, sha256: str) -> bool:
    return path.is_file() and path.stat().st_size == size and file_sha256(path) == sha256
