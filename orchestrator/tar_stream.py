"""One file as a tar archive, made while it is sent."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

CHUNK_BYTES = 256 * 1024

ByteProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


def tar_stream(
    source: Path | bytes, path: str, mode: int, digest: hashlib._Hash, on_progress: ByteProgress | None
) -> Iterator[bytes]:
    """A tar archive of one file named ``path``, in chunks; ``digest`` is fed the file's own bytes.

    Raises OSError for a ``source`` that cannot be read, or becomes shorter meanwhile.
    """
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    member = tarfile.TarInfo(path.lstrip("/"))
    member.size, member.mode = size, mode
    yield member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    done = 0
    for chunk in _chunks(source, size):
        digest.update(chunk)
        yield chunk
        done += len(chunk)
        if on_progress is not None:
            on_progress(done, size)
    yield bytes(-size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _chunks(source: Path | bytes, size: int) -> Iterator[bytes]:
    """Exactly ``size`` bytes of ``source``: a file that changes size meanwhile is an error, not a broken archive."""
    if isinstance(source, bytes):
        for start in range(0, size, CHUNK_BYTES):
            yield source[start : start + CHUNK_BYTES]
        return
    with source.open("rb") as file:
        left = size
        while left:
            chunk = file.read(min(CHUNK_BYTES, left))
            if not chunk:
                raise OSError(f"{source} became shorter while it was sent")
            left -= len(chunk)
            yield chunk
