"""Rows as they come: JSON lines on disk, a data set of the hub, or the demo's own text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from payload.demo import corpus
from payload.errors import PayloadError
from payload.places import place


@dataclass(frozen=True)
class Row:
    """One row with where it came from. ``content`` is None when the line was not a JSON object."""

    content: dict[str, Any] | None
    where: str


DEMO_ROWS = 2048
"""How many rows ``demo`` has where nobody says it."""


def read_rows(
    sources: Iterable[str], split: corpus.Split, limit: int | None, seed: int, demo_rows: int = DEMO_ROWS
) -> Iterator[Row]:
    """Yield at most ``limit`` rows of the sources in turn.

    A source is a JSONL path, ``hub:NAME`` or ``hub:NAME:SPLIT`` (read with ``datasets``), or ``demo``, whose rows
    depend on ``seed`` and ``split``; without a limit it has ``demo_rows`` of them. Raises ``PayloadError`` when a
    source cannot be opened.
    """
    made = demo_rows if limit is None else limit
    streams = (_read_source(source, split, made, seed) for source in sources)
    yield from islice((row for stream in streams for row in stream), limit)


def _read_source(source: str, split: corpus.Split, made: int, seed: int) -> Iterator[Row]:
    if source == "demo":
        rows = corpus.rows(split, made, seed)
        return (Row(dict(row), f"demo row {index}") for index, row in enumerate(rows))
    if source.startswith("hub:"):
        return _read_hub(source)
    return read_jsonl(place(source))


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield a file's rows; blank lines are passed over, a line that is no JSON object has content None."""
    if not path.is_file():
        raise PayloadError(
            f"No data file {path}.",
            hint="data.train and data.eval name JSONL files or hub:NAME.",
            kind="usage",
        )
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):
                content = None
            yield Row(content if isinstance(content, dict) else None, f"{path}:{number}")


def _read_hub(source: str) -> Iterator[Row]:
    import datasets

    name, _, split = source.removeprefix("hub:").partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except Exception as error:
        raise PayloadError(
            f"Cannot load the data set {name}: {error}",
            hint="Check its name and the network, or give a JSONL file instead.",
        ) from error
    return (Row(dict(row), f"{name} row {index}") for index, row in enumerate(rows))
