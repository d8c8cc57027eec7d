"""The portable form of a compile cache: one file that another container with the same facts can be warmed from.

A line of JSON (format, facts, and name, size and sha256 of each member), then the members one after the other: for each
program the bytes that ``torch.compiler.save_cache_artifacts`` gave in the process that ran it. torch unpickles what it
loads, so nothing is handed to it before its hash and its facts are checked.

For a GPU the kernels themselves are inside; for a CPU their C++ sources are, which the other machine compiles again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from payload.agent.durable import write_file
from payload.compile.cache import Artifact
from payload.compile.fingerprint import Facts
from payload.errors import PayloadError

FORMAT = 1
MAX_HEADER_BYTES = 64 * 1024


def write_artifact(path: Path, facts: Facts, blobs: Mapping[str, bytes]) -> Artifact:
    """Write ``blobs`` (program name -> torch's bytes) to ``path``, replacing it atomically."""
    members = sorted(blobs.items())
    header = {
        "format": FORMAT,
        "facts": asdict(facts),
        "members": [[name, len(blob), hashlib.sha256(blob).hexdigest()] for name, blob in members],
    }
    content = b"".join([json.dumps(header).encode("ascii"), b"\n", *(blob for _, blob in members)])
    write_file(path, content)
    return Artifact(path=str(path), bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def read_artifact(path: Path, expected: Facts) -> dict[str, bytes]:
    """The blobs by program name, checked.

    Raises PayloadError of kind ``refused`` when the file is damaged, of another format, or made under other facts
    (each difference is named).
    """
    try:
        with path.open("rb") as file:
            header = _header(path, file.readline(MAX_HEADER_BYTES))
            body = file.read()
    except OSError as error:
        raise _refused(path, f"it cannot be read: {error.strerror or error}") from None
    try:
        facts, members = Facts(**header["facts"]), [(str(n), int(s), str(d)) for n, s, d in header["members"]]
    except (KeyError, TypeError, ValueError) as error:
        raise _refused(path, f"it is damaged: its header lacks something ({error})") from None
    if facts != expected:
        raise _refused(path, f"it is from elsewhere ({'; '.join(facts.differences(expected))})")
    blobs, start = {}, 0
    for name, size, digest in members:
        blobs[name] = body[start : start + size]
        start += size
        if hashlib.sha256(blobs[name]).hexdigest() != digest:
            raise _refused(path, f"it is damaged: {name} has another hash than its header says")
    if start != len(body):
        raise _refused(path, "it is damaged: it is longer than its header says")
    return blobs


def _header(path: Path, line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
        found = header["format"]
    except (KeyError, TypeError, ValueError) as error:
        raise _refused(path, f"it is damaged: {error}") from None
    if found != FORMAT:
        raise _refused(path, f"it has format {found}, this release reads {FORMAT}")
    return dict(header)


def _refused(path: Path, why: str) -> PayloadError:
    return PayloadError(
        f"the compile artifact {path} is refused: {why}", "Warmup compiles here instead.", kind="refused"
    )
