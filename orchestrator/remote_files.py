"""What lies in a folder of a container, asked in one command each however many files there are.

Names travel on standard input, ended by NUL: the one string that SSH carries takes no more than 128 KiB (``execve(2)``,
MAX_ARG_STRLEN).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.container import Container
from orchestrator.errors import UsageError


@dataclass(frozen=True)
class Entry:
    """``kind`` is find's: f(ile), d(irectory), l(ink), p(ipe), s(ocket), b and c (devices). ``size`` in bytes."""

    kind: str
    size: int
    executable: bool
    """By its owner."""


def resolved(container: Container, paths: Iterable[str]) -> list[str]:
    """Where each absolute path leads once every link in it is followed; what is not there yet may be named too.

    Raises what :meth:`Container.explain` finds when the container cannot tell.
    """
    return _ask(container, ["realpath", "-z", "-m", "--"], paths, "its folders could not be looked at")


def entries(container: Container, path: str, *, below: bool) -> dict[str, Entry]:
    """The entry at ``path`` under the name ``""``, and (``below``) all in it by relative path; empty for none.

    Links are entries themselves and are not followed. Raises :class:`UsageError` for a path that leads through a file.
    """
    depth = () if below else ("-maxdepth", "0")
    done = container.run(["find", path, *depth, "-printf", r"%y\t%s\t%m\t%P\0"])
    if "Not a directory" in done.stderr_text():
        raise UsageError(
            f"{path} leads through a file in {container}.",
            "Name another place (TO=), or remove that file there.",
        )
    found = {}
    for line in _split(done.stdout):
        kind, size, mode, name = line.split("\t", 3)
        found[name] = Entry(kind, int(size), bool(int(mode, 8) & 0o100))
    return found


def hashes(container: Container, paths: Iterable[str], *, size_bytes: float) -> dict[str, str]:
    """The SHA-256 in hex of each regular file; without those that cannot be read.

    Whatever else is named would be read for ever (a pipe, a device) and must not be. ``size_bytes``: how large they
    are together, which decides how long it may take.
    """
    stdin = _joined(paths)
    if not stdin:
        return {}
    done = container.run(
        ["xargs", "-0", "sha256sum", "-z", "--"],
        stdin=stdin,
        idle_timeout_s=container.patience_to_read(size_bytes),
    )
    return {line[66:]: line[:64] for line in _split(done.stdout) if len(line) > 66}


def set_executable(container: Container, paths: Iterable[str], executable: bool) -> None:
    """Let everybody execute the files, or nobody. Raises what :meth:`Container.explain` finds."""
    mode = "a+x" if executable else "a-x"
    _ask(container, ["chmod", mode, "--"], paths, "a file's mode could not be changed")


def remove(container: Container, files: Iterable[str], folders: Iterable[str]) -> None:
    """Remove the files, and then those of ``folders`` (the deepest first) that are empty.

    Raises what :meth:`Container.explain` finds.
    """
    _ask(container, ["rm", "-f", "--"], files, "a file could not be removed")
    _ask(container, ["rmdir", "--ignore-fail-on-non-empty", "--"], folders, "a folder could not be removed")


def _ask(container: Container, argv: list[str], names: Iterable[str], what: str) -> list[str]:
    stdin = _joined(names)
    if not stdin:
        return []
    done = container.run(["xargs", "-0", *argv], stdin=stdin)
    if done.exit_status != 0:
        raise container.explain(done, what)
    return _split(done.stdout)


def _joined(names: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(name) + b"\0" for name in names)


def _split(output: bytes) -> list[str]:
    return [os.fsdecode(part) for part in output.split(b"\0") if part]
