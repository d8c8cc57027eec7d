"""The whole training set as packed rows on disk, and micro-batches drawn from it in a reproducible order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from payload.data.batch import Batch, empty_batch, positions_of
from payload.data.encoding import Document, encode_rows
from payload.data.packing import pack
from payload.data.rows import Row
from payload.errors import PayloadError
from payload.seeds import seed_of


@dataclass(frozen=True)
class Preparation:
    """What became of the rows: counts, and why rows were left out or changed."""

    rows_read: int
    documents: int
    packed_rows: int
    tokens: int
    loss_tokens: int
    skipped: dict[str, int]
    notes: dict[str, int]

    def describe(self) -> list[str]:
        """Lines for a person, every reason with its count."""
        lines = [
            f"data: {self.documents} documents of {self.rows_read} rows in {self.packed_rows} packed rows, "
            f"{self.tokens} tokens, {self.loss_tokens} supervised"
        ]
        lines += [f"data: {count} rows skipped: {reason}" for reason, count in sorted(self.skipped.items())]
        lines += [f"data: {count} rows {note}" for note, count in sorted(self.notes.items())]
        return lines


def prepare(
    rows: Iterable[Row], tokenizer: Any, row_length: int, min_loss_tokens: int, destination: Path
) -> Preparation:
    """Encode and pack the rows, and write them to ``destination``.

    The file is safetensors: ``input_ids`` int32, ``loss_mask`` bool and ``document_ids`` int32, all [R,S].

    Raises ``PayloadError`` when no row is usable, with the reasons, or when the chat template cannot be trusted.
    """
    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    rows_read = 0
    for encoded in encode_rows(rows, tokenizer, row_length, min_loss_tokens):
        rows_read += encoded.rows
        documents += encoded.documents
        skipped += encoded.skipped
        notes += encoded.notes
    if not documents:
        reasons = "; ".join(f"{count} rows: {reason}" for reason, count in sorted(skipped.items()))
        raise PayloadError(
            f"None of {rows_read} rows of training data can be used.",
            hint=f"Why: {reasons}." if reasons else "The sources hold no rows.",
        )
    packed = pack([len(document.input_ids) for document in documents], row_length)
    tensors = _fill(documents, packed, row_length)
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_name(f".{destination.name}.partial")
    preparation = Preparation(
        rows_read=rows_read,
        documents=len(documents),
        packed_rows=len(packed),
        tokens=sum(len(document.input_ids) for document in documents),
        loss_tokens=int(tensors["loss_mask"].sum()),
        skipped=dict(skipped),
        notes=dict(notes),
    )
    save_file(tensors, partial, metadata={"preparation": json.dumps(vars(preparation))})
    partial.replace(destination)
    return preparation


def read_preparation(path: Path) -> Preparation:
    """What `prepare` returned when it wrote ``path``."""
    with safe_open(path, framework="pt") as file:
        return Preparation(**json.loads(file.metadata()["preparation"]))


def _fill(documents: list[Document], packed: list[list[int]], row_length: int) -> dict[str, torch.Tensor]:
    shape = (len(packed), row_length)
    input_ids = torch.zeros(shape, dtype=torch.int32)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    document_ids = torch.full(shape, -1, dtype=torch.int32)
    for row, members in enumerate(packed):
        start = 0
        for number, member in enumerate(members):
            document = documents[member]
            end = start + len(document.input_ids)
            input_ids[row, start:end] = torch.frombuffer(document.input_ids, dtype=torch.int32)
            loss_mask[row, start:end] = torch.frombuffer(document.loss_mask, dtype=torch.bool)
            document_ids[row, start:end] = number
            start = end
    return {"input_ids": input_ids, "loss_mask": loss_mask, "document_ids": document_ids}


class PackedRows:
    """Micro-batches of ``batch_size`` rows; micro-batch ``index`` is a pure function of (file, seed, index).

    Every epoch is another permutation. Rows that do not fill the last micro-batch of an epoch are left out of that
    epoch; a file with fewer rows than one micro-batch is filled up with padding.
    """

    def __init__(self, path: Path, batch_size: int, seed: int) -> None:
        self._file = safe_open(path, framework="pt")
        self._slices = {
            name: self._file.get_slice(name) for name in ("input_ids", "loss_mask", "document_ids")
        }
        self.rows, self.row_length = self._slices["input_ids"].get_shape()
        self.batch_size = batch_size
        self.batches_per_epoch = max(1, self.rows // batch_size)
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def row_numbers(self, index: int) -> list[int]:
        """The packed rows that micro-batch ``index`` >= 0 consists of, in order; fewer than ``batch_size`` only when
        the file has fewer."""
        epoch, within = divmod(index, self.batches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(seed_of(self._seed, epoch))
            self._order = torch.randperm(self.rows, generator=generator).tolist()
            self._epoch = epoch
        return self._order[within * self.batch_size : (within + 1) * self.batch_size]

    def batch(self, index: int) -> Batch:
        """Micro-batch ``index`` >= 0, on the CPU."""
        return self.gather(self.row_numbers(index))

    def gather(self, rows: list[int]) -> Batch:
        """A batch of the packed rows named, filled up with padding to ``batch_size``."""
        batch = empty_batch(self.batch_size, self.row_length)
        for slot, row in enumerate(rows):
            batch.input_ids[slot] = self._slices["input_ids"][row]
            batch.loss_mask[slot] = self._slices["loss_mask"][row]
            batch.document_ids[slot] = self._slices["document_ids"][row]
        return Batch(
            input_ids=batch.input_ids,
            loss_mask=batch.loss_mask,
            document_ids=batch.document_ids,
            position_ids=positions_of(batch.document_ids),
        )
