"""Tiny wheels, made on the spot: a `torch` that says whatever a test needs, and packages that use it."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path


def make_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()
) -> Path:
    """A pure wheel of ``name`` with ``files`` (path -> text) in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    contents = {
        **files,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in contents.items():
            data = text.encode()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record += f"{file},sha256={digest},{len(data)}\n"
            wheel.writestr(file, data)
        wheel.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return path


def make_torch(
    folder: Path, version: str = "2.11.0+cu128", cuda: str | None = "12.8", git: str = "70d99e998b"
) -> Path:
    """A wheel named torch: its version attributes, a torch.distributed.run, and nothing else."""
    files = {
        "torch/__init__.py": f"from torch import version\n__version__ = {version!r}\nprint('torch prints')\n",
        "torch/version.py": f"cuda = {cuda!r}\ngit_version = {git + '0' * (40 - len(git))!r}\n",
        "torch/distributed/__init__.py": "",
        "torch/distributed/run.py": "import sys\nprint('run by', sys.executable, sys.prefix)\n",
    }
    return make_wheel(folder, "torch", version, files)


def make_index(folder: Path, wheels: list[Path]) -> str:
    """A package index (simple repository) of ``wheels`` as a file URL."""
    for wheel in wheels:
        project = folder / wheel.name.split("-")[0]
        project.mkdir(parents=True, exist_ok=True)
        (project / wheel.name).write_bytes(wheel.read_bytes())
        links = "".join(
            f'<a href="{found.name}">{found.name}</a>\n' for found in sorted(project.glob("*.whl"))
        )
        (project / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return folder.as_uri()
