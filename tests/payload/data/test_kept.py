"""A training set is encoded once, known again by all that it depends on, and made anew when it is damaged."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from payload.agent.checksum import file_sha256
from payload.data.kept import Kept, ensure_prepared
from payload.data.prepared import prepare
from payload.data.rows import Row

CONVERSATION = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Seven apples."}]
ROWS: list[dict[str, Any] | None] = [
    {"messages": CONVERSATION, "source": "a"},
    {"input_ids": [5, 6, 7, 8]},
    {"text": "one two three"},
    None,
]


class Source:
    """Rows that count how often they are read."""

    def __init__(self, rows: list[dict[str, Any] | None]) -> None:
        self.rows = rows
        self.read = 0

    def __call__(self) -> Iterator[Row]:
        self.read += 1
        return (Row(content, f"row {number}") for number, content in enumerate(self.rows))


def kept(home: Path, words: Any, rows: list[dict[str, Any] | None] = ROWS, **limits: int) -> Kept:
    return ensure_prepared(Source(rows), words, limits.get("row_length", 32), limits.get("least", 2), home)


def test_the_second_time_nothing_is_encoded_and_the_same_is_told(tmp_path: Path, words: Any) -> None:
    source = Source(ROWS)
    first = ensure_prepared(source, words, 32, 2, tmp_path)
    assert source.read == 2
    again = ensure_prepared(source, copy.deepcopy(words), 32, 2, tmp_path)
    assert source.read == 3, "to know them again"
    assert (first.was_there, again.was_there) == (False, True)
    assert (again.path, again.sha256, again.preparation) == (first.path, first.sha256, first.preparation)
    assert again.sha256 == file_sha256(again.path)
    assert again.preparation.skipped == {"not a JSON object": 1}
    plain = tmp_path / "plain.safetensors"
    assert prepare(source(), words, 32, 2, plain) == first.preparation
    expected = load_file(plain)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(first.path).items())


def test_whatever_changes_what_is_encoded_changes_the_name(tmp_path: Path, words: Any) -> None:
    other_template, more_tokens = copy.deepcopy(words), copy.deepcopy(words)
    other_template.chat_template = words.chat_template + "{# other #}"
    more_tokens.add_tokens(["apples"])
    longer = {"messages": [CONVERSATION[0], {"role": "assistant", "content": "Seven apples, or so."}]}
    made = [
        kept(tmp_path, words),
        kept(tmp_path, words, row_length=16),
        kept(tmp_path, words, least=3),
        kept(tmp_path, words, [*ROWS, {"text": "four"}]),
        kept(tmp_path, words, [ROWS[1], ROWS[0], *ROWS[2:]]),
        kept(tmp_path, words, [longer, *ROWS[1:]]),
        kept(tmp_path, words, [ROWS[0], {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 1, 1, 0]}, *ROWS[2:]]),
        kept(tmp_path, words, ROWS[:-1]),
        kept(tmp_path, words, [{"messages": CONVERSATION, "tools": [{}]}, *ROWS[1:]]),
        kept(tmp_path, words, [{"messages": CONVERSATION, "functions": [{}]}, *ROWS[1:]]),
        kept(tmp_path, other_template),
        kept(tmp_path, more_tokens),
    ]
    assert not any(one.was_there for one in made)
    assert len({one.path for one in made}) == len(made)


def test_what_encoding_does_not_look_at_changes_nothing(tmp_path: Path, words: Any) -> None:
    first = kept(tmp_path, words)
    again = kept(tmp_path, words, [{"messages": CONVERSATION, "source": object()}, *ROWS[1:]])  # type: ignore[dict-item]
    assert again.was_there
    assert again.path == first.path


def test_a_damaged_one_is_made_anew_and_what_was_interrupted_is_taken_away(
    tmp_path: Path, words: Any
) -> None:
    first = kept(tmp_path, words)
    content = first.path.read_bytes()
    first.path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (tmp_path / ".0123456789abcdef.dead").mkdir()
    again = kept(tmp_path, words)
    assert not again.was_there
    assert again.path.read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == [first.path.parent.name]


def test_rows_that_end_in_the_middle_leave_nothing_behind(tmp_path: Path, words: Any) -> None:
    class Stopped(Source):
        def __call__(self) -> Iterator[Row]:
            yield from super().__call__()
            if self.read == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_prepared(Stopped(ROWS), words, 32, 2, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_token_takes_a_few_bytes_until_it_is_packed(tmp_path: Path, words: Any) -> None:
    tokens, length = 200_000, 1000
    vocabulary = len(words)

    def rows() -> Iterator[Row]:
        for start in range(0, tokens, length):
            yield Row({"input_ids": [number % vocabulary for number in range(start, start + length)]}, "")

    tracemalloc.start()
    try:
        prepare(rows(), words, length, 1, tmp_path / "packed.safetensors")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * tokens
