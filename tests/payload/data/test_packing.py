from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from payload.data.batch import positions_of
from payload.data.packing import pack
from payload.data.prepared import PackedRows, prepare
from payload.data.rows import read_rows
from payload.errors import PayloadError


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60))
def test_every_document_is_in_one_row_that_it_fits_and_rows_are_well_filled(lengths: list[int]) -> None:
    rows = pack(lengths, 50)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert all(0 < tokens <= 50 for tokens in filled)
    assert sum(tokens <= 25 for tokens in filled) <= 1


def test_a_document_longer_than_a_row_is_no_mistake_that_passes() -> None:
    with pytest.raises(ValueError, match="51 tokens"):
        pack([51], 50)


def test_positions_begin_at_each_document_and_padding_has_none() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, -1, -1], [4, 4, 4, 4, 7, 7, 4]], dtype=torch.int32)
    expected = [[0, 1, 0, 1, 2, 0, 0], [0, 1, 2, 3, 0, 1, 0]]
    assert positions_of(documents).tolist() == expected


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(tmp_path: Path, words: Any, rows: list[Any]) -> Any:
    source = written(tmp_path / "rows.jsonl", rows)
    return prepare(read_rows([source], "train", None, 0), words, 16, 2, tmp_path / "packed.safetensors")


def test_packed_rows_hold_every_document_and_skips_are_counted_and_told(tmp_path: Path, words: Any) -> None:
    rows: list[Any] = [{"input_ids": list(range(5, 5 + length))} for length in (9, 7, 3, 12)]
    facts = prepared(tmp_path, words, [*rows, "not json\n", "\n", {"x": 1}, {"text": ""}])
    assert (facts.rows_read, facts.documents, facts.packed_rows) == (7, 4, 2)
    assert sum(facts.skipped.values()) == 3
    assert any("1 rows skipped: not a JSON object" in line for line in facts.describe())
    packed = PackedRows(tmp_path / "packed.safetensors", batch_size=2, seed=0)
    batch = packed.batch(0)
    found = set()
    for row in range(2):
        for document in set(batch.document_ids[row].tolist()) - {-1}:
            found.add(tuple(batch.input_ids[row][batch.document_ids[row] == document].tolist()))
    assert found == {tuple(row["input_ids"]) for row in rows}
    assert not batch.loss_mask[batch.document_ids < 0].any()


def test_no_usable_row_is_an_error_with_the_reasons(tmp_path: Path, words: Any) -> None:
    with pytest.raises(PayloadError, match="None of 2 rows") as caught:
        prepared(tmp_path, words, [{"x": 1}, {"text": ""}])
    assert "no messages, text or input_ids" in caught.value.hint


def test_a_missing_file_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match=r"No data file .*absent\.jsonl"):
        list(read_rows([str(tmp_path / "absent.jsonl")], "train", None, 0))


@pytest.mark.parametrize("suffix", ["", ":validation"])
def test_a_data_set_is_read_by_name_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """A folder is what `datasets` takes for a name without a network."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    for split, count in (("train", 3), ("validation", 2)):
        written(
            tmp_path / "rows" / f"{split}.jsonl", [{"text": f"{split} {number}"} for number in range(count)]
        )
    rows = list(read_rows([f"hub:{tmp_path}/rows{suffix}"], "train", None, 0))
    split = suffix.removeprefix(":") or "train"
    assert [row.content for row in rows] == [{"text": f"{split} {n}"} for n in range(len(rows))]
    assert len(rows) == (2 if suffix else 3)


def test_a_data_set_that_cannot_be_loaded_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match=f"Cannot load the data set {tmp_path}"):
        list(read_rows([f"hub:{tmp_path}"], "train", None, 0))


def test_the_order_depends_on_seed_and_epoch_alone_and_covers_every_row(tmp_path: Path, words: Any) -> None:
    prepared(tmp_path, words, [{"input_ids": [5 + row] * 16} for row in range(10)])
    path = tmp_path / "packed.safetensors"
    first, second = PackedRows(path, 2, seed=3), PackedRows(path, 2, seed=3)
    order = [first.row_numbers(index) for index in range(10)]
    assert [second.row_numbers(index) for index in reversed(range(10))] == order[::-1]
    for epoch in (order[:5], order[5:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(10))
    assert order[:5] != order[5:]
    assert [PackedRows(path, 2, seed=4).row_numbers(index) for index in range(5)] != order[:5]


def test_fewer_rows_than_a_batch_are_filled_up_with_padding(tmp_path: Path, words: Any) -> None:
    prepared(tmp_path, words, [{"input_ids": [5] * 16}])
    batch = PackedRows(tmp_path / "packed.safetensors", batch_size=3, seed=0).batch(5)
    assert batch.document_ids.shape == (3, 16)
    assert (batch.document_ids >= 0).any(dim=1).tolist() == [True, False, False]
