"""Answers on disk: JSON lines by key, in files that several ranks write side by side and all of them read.

``answers.jsonl`` is the first rank's, ``answers.1.jsonl`` the second's, and so on. A rank appends to its own file
alone; which file an answer lies in means nothing. A last line that was cut off does not count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from payload.data.rows import Row
from payload.errors import PayloadError

Append = Callable[[list[dict[str, Any]]], None]


class _Place(NamedTuple):
    path: Path
    offset: int


def answered_keys(first: Path) -> set[str]:
    """Keys of the answers in ``first`` and the files beside it. Raises ``PayloadError`` naming a damaged file."""
    return set(_places(first))


def read_answers(first: Path, keys: Iterable[str]) -> Iterator[Row]:
    """The answers of ``keys`` in their order, whichever file each is in; those that are missing are passed over.

    A line is a row to learn from, and so is each under its ``earlier``, which come before it.
    """
    places = _places(first)
    files: dict[Path, BinaryIO] = {}
    try:
        for key in keys:
            place = places.get(key)
            if place is None:
                continue
            if place.path not in files:
                files[place.path] = place.path.open("rb")
            files[place.path].seek(place.offset)
            line = json.loads(files[place.path].readline())
            where = f"{place.path.name}: {key}"
            yield from (Row(row, where) for row in line.get("earlier", []))
            yield Row(line, where)
    finally:
        for file in files.values():
            file.close()


@contextmanager
def appending(first: Path, part: int) -> Iterator[Append]:
    """A function that puts answers at the end of the file of one rank, the ``part``-th, and on the disk.

    Raises ``PayloadError`` when the file cannot be written.
    """
    path = first if part == 0 else first.with_suffix(f".{part}{first.suffix}")
    with _said_of(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:

        def append(answers: list[dict[str, Any]]) -> None:
            with _said_of(path):
                file.write(b"".join(json.dumps(answer).encode() + b"\n" for answer in answers))
                file.flush()
                os.fsync(file.fileno())

        with _said_of(path):
            _cut_half_a_line(path)
        yield append


@contextmanager
def _said_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PayloadError(f"The answers cannot be written to {path}: {error.strerror}.") from error


def _places(first: Path) -> dict[str, _Place]:
    beside = sorted(first.parent.glob(f"{first.stem}.*{first.suffix}"))
    places: dict[str, _Place] = {}
    for path in filter(Path.is_file, [first, *beside]):
        offset = 0
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    places.setdefault(json.loads(line)["key"], _Place(path, offset))
                except (ValueError, KeyError, TypeError) as error:
                    raise PayloadError(
                        f"{path} is damaged at byte {offset}.",
                        hint="Delete the file to generate its answers anew.",
                    ) from error
                offset += len(line)
    return places


def _cut_half_a_line(path: Path) -> None:
    content_end = path.stat().st_size
    with path.open("rb") as file:
        end, block = content_end, 1 << 16
        while end > 0:
            start = max(0, end - block)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
    if end < content_end:
        os.truncate(path, end)
