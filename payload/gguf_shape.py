"""What a GGUF file says of its model's sizes, read from its header alone; no gguf, no torch.

Source of the layout: the GGUF specification (ggml-org/ggml ``docs/gguf.md``), versions 2 and 3, little-endian: magic,
version, number of tensors, number of metadata entries; the entries (key, type, value); the tensors' names and shapes.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from payload.errors import PayloadError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 1 << 16
_LONGEST_NAME = 1 << 16


class _NotGgufError(Exception):
    """The file is not what its format says; the text says where."""


def gguf_config(path: Path) -> dict[str, Any]:
    """The sizes under the names that a config.json has. Raises PayloadError (kind ``usage``) naming the file."""
    try:
        with path.open("rb") as file:
            metadata, tensors = _Header(file, path.stat().st_size).read()
    except OSError as error:
        raise PayloadError(f"{path} cannot be read: {error.strerror}", kind="usage") from error
    except (_NotGgufError, struct.error, UnicodeDecodeError) as error:
        raise PayloadError(f"{path} is no whole GGUF file: {error}", kind="usage") from error
    family = metadata.get("general.architecture")
    names = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
    }
    config = {ours: metadata.get(f"{family}.{theirs}") for ours, theirs in names.items()}
    # A shape has the fastest dimension first: [hidden, vocabulary].
    embedding = tensors.get("token_embd.weight", ())
    config["vocab_size"] = embedding[1] if len(embedding) == 2 else metadata.get(f"{family}.vocab_size")
    config["tie_word_embeddings"] = "output.weight" not in tensors
    return {name: value for name, value in config.items() if value is not None}


class _Header:
    """Reads a header from its start; every length is checked against what the file can hold."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file = file
        self._size = size_bytes

    def read(self) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        """The scalar and text entries of the metadata, and the tensors' shapes."""
        if self._file.read(4) != b"GGUF":
            raise _NotGgufError("it does not begin with GGUF")
        version, number_of_tensors, entries = self._numbers("IQQ")
        if version not in (2, 3):
            raise _NotGgufError(f"it is of version {version}")
        if max(number_of_tensors, entries) > _MOST_ENTRIES:
            raise _NotGgufError(f"it counts {number_of_tensors} tensors and {entries} entries")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._text()
            metadata[key] = self._value(*self._numbers("I"))
        return metadata, dict(self._tensor() for _ in range(number_of_tensors))

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self._file.read(struct.calcsize(f"<{layout}")))

    def _text(self) -> str:
        (length,) = self._numbers("Q")
        if length > _LONGEST_NAME:
            raise _NotGgufError(f"a name of {length} bytes")
        return self._file.read(length).decode()

    def _skip(self, length: int) -> None:
        if self._file.tell() + length > self._size:
            raise _NotGgufError("it ends before its header does")
        self._file.seek(length, 1)

    def _value(self, kind: int) -> Any:
        """A number, True or False, or text; None for text too long to be a size and for a list."""
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            (length,) = self._numbers("Q")
            if length <= _LONGEST_NAME:
                return self._file.read(length).decode("utf-8", "replace")
            self._skip(length)
            return None
        if kind != _ARRAY:
            raise _NotGgufError(f"an entry of unknown type {kind}")
        of, length = self._numbers("IQ")
        if of in _SCALARS:
            self._skip(length * struct.calcsize(_SCALARS[of]))
        elif of == _STRING:
            for _ in range(min(length, self._size)):
                self._skip(*self._numbers("Q"))
        else:
            raise _NotGgufError(f"a list of type {of}")
        return None

    def _tensor(self) -> tuple[str, tuple[int, ...]]:
        name, (dimensions,) = self._text(), self._numbers("I")
        if dimensions > 8:
            raise _NotGgufError(f"a tensor of {dimensions} dimensions")
        shape = self._numbers("Q" * dimensions)
        self._numbers("IQ")  # its type and place
        return name, shape
