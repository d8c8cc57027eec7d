"""The target's features of a whole training set on disk, so that training needs no target.

Features are those of the packed rows, in shards of safetensors with a checksum each. The size is known before
anything is written and compared with the free space; a cache is there as a whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from payload.agent.checksum import file_sha256
from payload.agent.durable import read_json
from payload.data.sealed import MANIFEST, sealed_folder
from payload.errors import PayloadError

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

    @property
    def row_bytes(self) -> int:
        itemsize: int = getattr(torch, self.dtype).itemsize
        return self.length * (self.features + self.teacher) * itemsize

    @property
    def total_bytes(self) -> int:
        """What the cache will take on disk, headers of the shards aside."""
        return self.rows * self.row_bytes

    @property
    def rows_per_shard(self) -> int:
        return max(1, _SHARD_BYTES // self.row_bytes)


RowFeatures = tuple[torch.Tensor, torch.Tensor | None]
"""Features [S, n*H] of one packed row, and the target's final hidden states [S, H] or None."""


def write_feature_cache(
    folder: Path, shape: FeatureShape, rows: Iterable[RowFeatures], report: Callable[[str], None]
) -> None:
    """Write the features of all rows, in order. Raises ``PayloadError`` when the disk has no room for them.

    Nothing is left behind when it fails.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    needed = shape.total_bytes + _SPARE_BYTES
    report(f"features: {shape.total_bytes / 1e9:.1f} GB for {shape.rows} rows; {free / 1e9:.1f} GB are free")
    if needed > free:
        raise PayloadError(
            f"The features and a reserve need {needed / 1e9:.1f} GB; {folder.parent} has {free / 1e9:.1f} GB free.",
            hint="Free some space, use fewer or shorter rows, or set data.features: online.",
            kind="refused",
        )
    with sealed_folder(folder, **vars(shape)) as partial:
        held: list[RowFeatures] = []
        shards = written = 0
        for row in rows:
            held.append(row)
            if len(held) == shape.rows_per_shard:
                _write_shard(partial, shards, held)
                written, shards, held = written + len(held), shards + 1, []
                report(f"features: {written} of {shape.rows} rows")
        if held:
            _write_shard(partial, shards, held)
            written += len(held)
        if written != shape.rows:
            raise PayloadError(f"The feature cache got {written} rows instead of {shape.rows}.")


class FeatureCache:
    """A cache on disk, read row by row; each shard is checked against its checksum when it is first opened."""

    def __init__(self, folder: Path) -> None:
        try:
            manifest: dict[str, Any] = read_json(folder / MANIFEST)
            self._files = manifest.pop("files")
            self.shape = FeatureShape(**manifest)
        except (OSError, KeyError, TypeError) as error:
            raise PayloadError(f"{folder} is no whole feature cache: {error}") from error
        self._folder = folder
        self._open: dict[int, Any] = {}

    def read(self, row: int) -> RowFeatures:
        """Features of one packed row, on the CPU. Raises ``PayloadError`` when its shard is damaged."""
        number, within = divmod(row, self.shape.rows_per_shard)
        shard = self._open.get(number) or self._open_shard(number)
        teacher = shard.get_slice("teacher")[within] if self.shape.teacher else None
        return shard.get_slice("features")[within], teacher

    def _open_shard(self, number: int) -> Any:
        path = self._folder / _shard_name(number)
        expected = self._files.get(path.name, {}).get("sha256")
        if not path.is_file() or file_sha256(path) != expected:
            raise PayloadError(
                f"The feature shard {path} is missing or damaged.",
                hint="Delete the cache's folder to build it anew.",
            )
        self._open[number] = safe_open(path, framework="pt")
        return self._open[number]


def _write_shard(folder: Path, number: int, rows: list[RowFeatures]) -> None:
    tensors = {"features": torch.stack([features for features, _ in rows]).cpu()}
    teachers = [teacher for _, teacher in rows if teacher is not None]
    if teachers:
        tensors["teacher"] = torch.stack(teachers).cpu()
    save_file(tensors, folder / _shard_name(number), metadata={"rows": json.dumps(len(rows))})


def _shard_name(number: int) -> str:
    return f"features-{number:05d}.safetensors"
