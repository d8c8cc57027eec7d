"""Rows encoded on all cores: one alone takes hours for the rows of a large run.

Each row goes several times through a chat template and a tokenizer, and rows do not depend on each other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

from payload.agent.leash import die_with
from payload.data.rows import Row
from payload.data.tokens import ROW_FIELDS, Example, RowSkippedError, encode_row, verify_template
from payload.errors import PayloadError

ROWS_ALONE = 2048
"""Rows that are encoded before other processes are started, which costs seconds."""
_CHUNK_ROWS = 64
_Encode = Callable[..., "Encoded"]
_MOST_PROCESSES = 32


class Document(NamedTuple):
    """An `Example` in 5 bytes a token: as lists, those of a large set take more memory than a machine has."""

    input_ids: array[int]
    loss_mask: bytearray


class Encoded(NamedTuple):
    """What became of some rows: the documents in order, and counts of reasons and notes as `encode_row` has them."""

    rows: int
    documents: list[Document]
    skipped: Counter[str]
    notes: Counter[str]


def encode_rows(
    rows: Iterable[Row], tokenizer: Any, max_length: int, min_loss_tokens: int, processes: int | None = None
) -> Iterator[Encoded]:
    """The rows in turn, some at a time, by up to ``processes`` processes (None: one for each core that this one may
    use). The result does not depend on how many they are.

    Raises ``PayloadError`` when the chat template cannot be trusted, or when a process was ended from outside.
    """
    trusted = _trusted(rows, tokenizer)
    encode = partial(_encode, max_length=max_length, min_loss_tokens=min_loss_tokens)
    yield encode(islice(trusted, ROWS_ALONE), tokenizer)
    following = list(islice(trusted, _CHUNK_ROWS))
    if not following:
        return
    count = min(_MOST_PROCESSES, len(os.sched_getaffinity(0))) if processes is None else processes
    pickled = _pickled(tokenizer) if count > 1 else None
    if pickled is None:
        yield encode(chain(following, trusted), tokenizer)
    else:
        alone = partial(encode, tokenizer=tokenizer)
        yield from _by_processes(chain(following, trusted), pickled, alone, encode, count)


def _by_processes(
    rows: Iterator[Row], pickled: bytes, alone: Callable[[list[Row]], Encoded], encode: _Encode, count: int
) -> Iterator[Encoded]:
    # Not forked: this process has threads and, on a GPU machine, a CUDA context.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, _begin, (pickled, encode, os.getpid()))
    pending: deque[tuple[list[Row], Future[Encoded | None]]] = deque()

    def oldest() -> Encoded:
        chunk, future = pending.popleft()
        try:
            return future.result() or alone(chunk)
        except RecursionError:
            return alone(chunk)  # a row that nests too deeply to be sent

    try:
        while chunk := list(islice(rows, _CHUNK_ROWS)):
            pending.append((chunk, pool.submit(_encode_here, chunk)))
            if len(pending) > 2 * count:
                yield oldest()
        while pending:
            yield oldest()
    except BrokenProcessPool as error:
        next(rows, None)  # tells of a stop, which may have been what ended it
        raise PayloadError(
            "A process that encodes the training data was ended from outside.",
            "It may have been out of memory: see dmesg on the host, and give the container more, or fewer cores.",
        ) from error
    finally:
        # On Pythons without the mend of gh-94777, a pool whose process was killed would wait for ever for its own
        # thread, which waits for somebody to read what it writes.
        if (queue := getattr(pool, "_call_queue", None)) is not None:
            queue._reader.close()
        pool.shutdown(cancel_futures=True)


_here: list[Callable[[list[Row]], Encoded]] = []
"""In a process that encodes: how. Empty when it cannot read the tokenizer; an error as it begins would look like its
violent end."""


def _begin(tokenizer: bytes, encode: _Encode, parent: int) -> None:
    # A stop of the whole group is the parent's to answer, which then ends its processes; killed, it takes them along.
    os.setsid()
    die_with(parent)
    with contextlib.suppress(Exception):
        from transformers.dynamic_module_utils import init_hf_modules

        init_hf_modules()  # a tokenizer with code of its own is found there
        _here.append(partial(encode, tokenizer=pickle.loads(tokenizer)))


def _encode_here(rows: list[Row]) -> Encoded | None:
    return _here[0](rows) if _here else None


def _encode(rows: Iterable[Row], tokenizer: Any, max_length: int, min_loss_tokens: int) -> Encoded:
    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    read = 0
    for row in rows:
        read += 1
        try:
            example = encode_row(row, tokenizer, max_length, min_loss_tokens, notes)
        except RowSkippedError as error:
            skipped[str(error)] += 1
        else:
            documents.append(_compact(example))
    return Encoded(read, documents, skipped, notes)


def _compact(example: Example) -> Document:
    return Document(array("i", example.input_ids), bytearray(example.loss_mask))


def _trusted(rows: Iterable[Row], tokenizer: Any) -> Iterator[Row]:
    """The rows, with only what encoding looks at. The first chat needs a template that can be trusted."""
    verified = False
    for row in rows:
        if row.content is None:
            yield row
            continue
        if "messages" in row.content and not verified:
            verify_template(tokenizer)
            verified = True
        yield Row({name: row.content[name] for name in ROW_FIELDS if name in row.content}, row.where)


def _pickled(tokenizer: Any) -> bytes | None:
    """None for a tokenizer that cannot be sent to another process."""
    try:
        return pickle.dumps(tokenizer)
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError):
        return None
