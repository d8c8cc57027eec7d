"""Wheels made on the spot, so that building a venv can be tested without a package index."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def build_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str],
    requires: Sequence[str] = (),
    tag: str = "py3-none-any",
) -> Path:
    """A wheel of ``files`` (path -> text) in ``folder``; returns its path."""
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    content = {
        **files,
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "".join(
        f"{path},sha256={_digest(text)},{len(text.encode())}\n" for path, text in content.items()
    )
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return wheel


def build_torch_wheel(
    folder: Path, version: str = "2.13.0+cpu", *, cuda: str | None = None, git: str = "c0ffee" * 6 + "c0ff"
) -> Path:
    """A wheel that answers for torch: its version, ``torch.version.cuda`` and ``torch.version.git_version``."""
    text = f"__version__ = {version!r}\ncuda = {cuda!r}\ngit_version = {git!r}\nhip = None\n"
    files = {"torch/__init__.py": "from torch.version import __version__\n", "torch/version.py": text}
    return build_wheel(folder, "torch", version, files)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
