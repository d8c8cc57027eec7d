"""The portable form of a compile cache: one file that another container with the same facts can be warmed from.

A zip without compression: ``header.json`` (format, facts, sha256 of each member) and one member for each program,
the bytes that ``torch.compiler.save_cache_artifacts`` gave in the process that ran it. torch unpickles what it
loads, so nothing is handed to it before its hash and its facts are checked.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from payload.compile.cache import Artifact, sha256_of
from payload.compile.fingerprint import Facts
from payload.errors import PayloadError

FORMAT = 1
HEADER = "header.json"


def write_artifact(path: Path, facts: Facts, blobs: Mapping[str, bytes]) -> Artifact:
    """Write ``blobs`` (program name -> torch's bytes) to ``path``, replacing it atomically."""
    header = {
        "format": FORMAT,
        "facts": asdict(facts),
        "members": {name: hashlib.sha256(blob).hexdigest() for name, blob in sorted(blobs.items())},
    }
    beside = path.with_name(f".{path.name}.new")
    with zipfile.ZipFile(beside, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(HEADER, json.dumps(header, indent=1, sort_keys=True))
        for name, blob in sorted(blobs.items()):
            archive.writestr(f"{name}.bin", blob)
    beside.replace(path)
    return Artifact(path=str(path), bytes=path.stat().st_size, sha256=sha256_of(path))


def read_artifact(path: Path, expected: Facts) -> dict[str, bytes]:
    """The blobs by program name, checked.

    Raises PayloadError of kind ``refused`` when the file is damaged, of another format, or made under other facts
    (each difference is named).
    """
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read(HEADER))
            if header["format"] != FORMAT:
                raise _refused(path, f"it has format {header['format']}, this release reads {FORMAT}")
            facts = Facts(**header["facts"])
            blobs = {name: archive.read(f"{name}.bin") for name in header["members"]}
    except OSError as error:
        raise _refused(path, f"it cannot be read: {error.strerror or error}") from None
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        raise _refused(path, f"it is damaged: {error}") from None
    if facts != expected:
        raise _refused(path, f"it is from elsewhere ({'; '.join(facts.differences(expected))})")
    for name, digest in header["members"].items():
        if hashlib.sha256(blobs[name]).hexdigest() != digest:
            raise _refused(path, f"it is damaged: {name} has another hash than its header says")
    return blobs


def _refused(path: Path, why: str) -> PayloadError:
    return PayloadError(
        f"the compile artifact {path} is refused: {why}", "Warmup compiles here instead.", kind="refused"
    )
