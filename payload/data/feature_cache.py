"""The target's features of a whole training set on disk, so that training needs no target.

Features are those of the packed rows, in shards of safetensors. Several ranks write shards side by side, each shard is
there as a whole or not at all, and what an interrupted job has written is used by the next. The size is known before
anything is written and compared with the free space; the cache has its name once all shards are there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from payload.agent.durable import leftovers, put_in_place, read_json, remove, sync_folder, write_json
from payload.data.sealed import MANIFEST
from payload.errors import PayloadError

FORMAT = 2
"""Of the shards: another number is another cache."""
_SHARD_BYTES = 1 << 30
_SPARE_BYTES = 1 << 30
"""Left free on the disk for checkpoints and logs."""


@dataclass(frozen=True)
class FeatureShape:
    """R packed rows of S tokens; ``features`` = n*H, ``teacher`` = H or 0, each of ``dtype`` by its torch name."""

    rows: int
    length: int
    features: int
    teacher: int
    dtype: str
    rows_per_shard: int

    @property
    def row_bytes(self) -> int:
        return _row_bytes(self.length, self.features + self.teacher, self.dtype)

    @property
    def total_bytes(self) -> int:
        """What the cache will take on disk, headers of the shards aside."""
        return self.rows * self.row_bytes

    @property
    def shards(self) -> int:
        return -(-self.rows // self.rows_per_shard)

    def rows_of(self, shard: int) -> range:
        """The numbers of the rows in a shard."""
        return range(shard * self.rows_per_shard, min((shard + 1) * self.rows_per_shard, self.rows))


def shape_of(rows: int, length: int, features: int, teacher: int, dtype: str) -> FeatureShape:
    """The shape, with shards of about a gigabyte."""
    rows_per_shard = max(1, _SHARD_BYTES // _row_bytes(length, features + teacher, dtype))
    return FeatureShape(rows, length, features, teacher, dtype, rows_per_shard)


def _row_bytes(length: int, numbers: int, dtype: str) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return length * numbers * itemsize


Features = tuple[Tensor, Tensor | None]
"""Features [..., S, n*H] of packed rows, and the target's final hidden states [..., S, H] or None."""


def is_whole(folder: Path) -> bool:
    """Whether the cache was sealed: then nothing of it is missing."""
    return (folder / MANIFEST).is_file()


def begin_features(folder: Path, shape: FeatureShape) -> str:
    """Make room for a cache before any rank writes, and clear away half shards; returns a line on its size.

    Raises ``PayloadError`` when the disk has no room for what is not written yet.
    """
    partial = _partial(folder)
    partial.mkdir(parents=True, exist_ok=True)
    for left in leftovers(partial):
        remove(left)
    there = [shard for shard in range(shape.shards) if (partial / _shard_name(shard)).is_file()]
    kept = sum(len(shape.rows_of(shard)) for shard in there)
    free = shutil.disk_usage(partial).free
    needed = (shape.rows - kept) * shape.row_bytes + _SPARE_BYTES
    if needed > free:
        if not there:
            partial.rmdir()
        raise PayloadError(
            f"The features and a reserve need {needed / 1e9:.1f} GB; {folder.parent} has {free / 1e9:.1f} GB free.",
            hint="Free some space, use fewer or shorter rows, or set data.features: online.",
            kind="refused",
        )
    return (
        f"features: {shape.total_bytes / 1e9:.1f} GB for {shape.rows} rows, {kept} kept from before; "
        f"{free / 1e9:.1f} GB are free"
    )


def write_features(
    folder: Path,
    shape: FeatureShape,
    claim: Callable[[], int],
    compute: Callable[[range], Features],
    wrote: Callable[[int], None],
) -> None:
    """One rank's part: write the shards that ``claim`` names until it names one that there is not.

    ``compute`` gives the features of rows; ``wrote`` is told how many rows each shard that is there then has. Raises
    ``PayloadError`` when a shard cannot be written; nothing half-written stays.
    """
    partial = _partial(folder)
    while (shard := claim()) < shape.shards:
        rows, path = shape.rows_of(shard), partial / _shard_name(shard)
        if not path.is_file():
            _write_shard(path, compute(rows))
        wrote(len(rows))


def seal_features(folder: Path, shape: FeatureShape) -> None:
    """Give the cache its name, once all ranks have written their part."""
    partial = _partial(folder)
    files = {}
    for shard in range(shape.shards):
        path = partial / _shard_name(shard)
        if not path.is_file():
            raise PayloadError(
                f"{partial} lacks {path.name}.", hint="Start the run again: the others are kept."
            )
        files[path.name] = {"size": path.stat().st_size}
    write_json(partial / MANIFEST, {**vars(shape), "files": files})
    put_in_place(partial, folder)


class FeatureCache:
    """A cache on disk, read row by row; each row is checked against its checksum."""

    def __init__(self, folder: Path) -> None:
        try:
            manifest: dict[str, Any] = read_json(folder / MANIFEST)
            del manifest["files"]
            self.shape = FeatureShape(**manifest)
        except (OSError, KeyError, TypeError) as error:
            raise PayloadError(f"{folder} is no whole feature cache: {error}") from error
        self._folder = folder
        self._open: dict[int, Any] = {}

    def read(self, row: int) -> Features:
        """Features of one packed row, on the CPU. Raises ``PayloadError`` when they are damaged."""
        number, within = divmod(row, self.shape.rows_per_shard)
        path = self._folder / _shard_name(number)
        try:
            if number not in self._open:
                self._open[number] = safe_open(path, framework="pt")
            shard = self._open[number]
            features = shard.get_slice("features")[within]
            teacher = shard.get_slice("teacher")[within] if self.shape.teacher else None
            expected = shard.get_slice("checksums")[within]
        except (OSError, SafetensorError, IndexError) as error:
            raise self._damaged(path, str(error)) from error
        if not torch.equal(_checksums(features, teacher), expected):
            raise self._damaged(path, f"row {within} differs from its checksum")
        return features, teacher

    def _damaged(self, path: Path, how: str) -> PayloadError:
        return PayloadError(
            f"The feature shard {path} is missing or damaged: {how}.",
            hint="Delete the cache's folder to build it anew.",
        )


def _write_shard(path: Path, features: Features) -> None:
    of_rows, teachers = features
    of_teacher = [None] * len(of_rows) if teachers is None else list(teachers)
    tensors = {
        "features": of_rows,
        "checksums": torch.stack([_checksums(*row) for row in zip(of_rows, of_teacher, strict=True)]),
    }
    if teachers is not None:
        tensors["teacher"] = teachers
    beside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        save_file(tensors, beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        raise PayloadError(
            f"The features cannot be written to {path.parent}: {error}.", "Shards written so far are kept."
        ) from error
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def _checksums(features: Tensor, teacher: Tensor | None) -> Tensor:
    """Of one row, int64 [2]: the sum of the bytes of each, read as integers; as fast as memory, unlike a hash."""
    return torch.stack(
        [torch.zeros((), dtype=torch.int64) if one is None else _sum(one) for one in (features, teacher)]
    )


def _sum(tensor: Tensor) -> Tensor:
    octets = tensor.contiguous().flatten().view(torch.uint8)
    widest = next(
        kind for kind in (torch.int64, torch.int16, torch.uint8) if octets.numel() % kind.itemsize == 0
    )
    return octets.view(widest).sum(dtype=torch.int64)


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _shard_name(number: int) -> str:
    return f"features-{number:05d}.safetensors"
