"""The packed training set, kept under a name made of all that it depends on: a run on the same rows encodes nothing.

Encoding takes all cores for minutes, or one for hours, where to read and hash the rows takes a fraction of that.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from payload.agent.durable import leftovers, read_json, remove
from payload.data import encoding, packing, prepared, tokens
from payload.data.prepared import Preparation, prepare, read_preparation
from payload.data.rows import Row
from payload.data.sealed import MANIFEST, open_sealed, sealed_folder
from payload.data.tokens import ROW_FIELDS
from payload.errors import PayloadError

_FILE = "packed.safetensors"
_ENCODERS = ("transformers", "tokenizers", "jinja2")


@dataclass(frozen=True)
class Kept:
    """A training set on disk: its file, as `prepare` writes it, that file's checksum, and what became of the rows."""

    path: Path
    sha256: str
    preparation: Preparation
    was_there: bool


def ensure_prepared(
    rows: Callable[[], Iterable[Row]], tokenizer: Any, row_length: int, min_loss_tokens: int, home: Path
) -> Kept:
    """The training set of ``rows``, which are read once to know it again and once more if it must be made.

    It lies in a folder of ``home``; one that is damaged is made anew. Raises ``PayloadError`` as `prepare` does.
    """
    settings = [row_length, min_loss_tokens, _encoder_digest(tokenizer)]
    folder = home / _digest(settings, rows())[:16]
    was_there = _is_whole(folder)
    if not was_there:
        for left in leftovers(home):
            remove(left)
        with sealed_folder(folder) as partial:
            prepare(rows(), tokenizer, row_length, min_loss_tokens, partial / _FILE)
    sha256: str = read_json(folder / MANIFEST)["files"][_FILE]["sha256"]
    return Kept(folder / _FILE, sha256, read_preparation(folder / _FILE), was_there)


def _is_whole(folder: Path) -> bool:
    try:
        open_sealed(folder)
    except PayloadError:
        return False
    return True


def _digest(settings: list[Any], rows: Iterable[Row]) -> str:
    digest = hashlib.sha256(json.dumps(settings).encode())
    for row in rows:
        content = row.content
        read = None if content is None else {name: content[name] for name in ROW_FIELDS if name in content}
        digest.update(json.dumps(read, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


def _encoder_digest(tokenizer: Any) -> str:
    """Of the tokenizer with its chat template, the packages that run it, and the code here that asks them."""
    digest = hashlib.sha256(json.dumps([_version(name) for name in _ENCODERS]).encode())
    with TemporaryDirectory() as folder:
        try:
            tokenizer.save_pretrained(folder)
        except NotImplementedError:
            # One that cannot be written down is not known again.
            digest.update(secrets.token_bytes(16))
        code = [Path(module.__file__ or "") for module in (tokens, encoding, packing, prepared)]
        for path in (*sorted(Path(folder).rglob("*")), *code):
            if path.is_file():
                digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
