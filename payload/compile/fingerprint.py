"""What a compile cache is good for: the facts that decide whether its kernels may be used again, and their name.

torch checks its own cache keys as well; the fingerprint gives each set of facts a directory of its own, so that
two builds, two kinds of GPU or two recipes never share one, and a run can pin the one it was warmed for.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PAYLOAD_ROOT = Path(__file__).resolve().parent.parent

# Files and folders of the payload whose code ends up in compiled graphs or decides how they are compiled.
COMPILED_SOURCES = (
    "drafter",
    "target.py",
    "target_attention.py",
    "trainer/program.py",
    "compile/never_dense.py",
    "compile/guard.py",
)

# What of a recipe decides shapes, dtypes and graphs. None takes the whole section.
SHAPE_FIELDS: Mapping[str, tuple[str, ...] | None] = {
    "target": ("model", "gguf_file", "dtype"),
    "drafter": None,
    "data": ("max_length",),
    "loss": None,
    "train": ("batch_size", "num_anchors", "fp8"),
    "compile": None,
}


@dataclass(frozen=True)
class Facts:
    """Everything that a compile cache depends on; equal facts, equal fingerprint."""

    torch: str
    cuda: str
    torch_git: str
    triton: str
    python: str
    machine: str
    arch: str
    compiler: str
    sources: str
    shapes: str

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the SHA-256 of the facts."""
        return _digest(json.dumps(asdict(self), sort_keys=True).encode("ascii"))

    def differences(self, other: Facts) -> list[str]:
        """``name: ours, theirs`` for each fact in which the two differ."""
        ours, theirs = asdict(self), asdict(other)
        return [f"{name}: {ours[name]}, not {theirs[name]}" for name in ours if ours[name] != theirs[name]]


def collect_facts(recipe: Mapping[str, Any], device: str) -> Facts:
    """The facts of this venv, this machine and ``recipe`` (its resolved dict form) on ``device`` (cuda or cpu)."""
    import torch

    return Facts(
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        torch_git=torch.version.git_version or "",
        triton=triton_version(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        machine=platform.machine(),
        arch=architecture(device, cpu_threads(recipe)),
        # Triton compiles for the GPU by itself, but its launchers and inductor's wrappers go through the C++ compiler.
        compiler=compiler_version(),
        sources=sources_digest(PAYLOAD_ROOT),
        shapes=shapes_digest(recipe),
    )


def cpu_threads(recipe: Mapping[str, Any]) -> int:
    """CPU threads that each rank computes with: the cores are shared among the drafters.

    A target's forward pass is a small part of the work, and its threads sleep while it waits. Inductor writes the
    number into its CPU kernels, so warm-up and training must take it from here.
    """
    return max(1, (os.cpu_count() or 1) // len(recipe["topology"]["drafters"]))


def architecture(device: str, threads: int) -> str:
    """``NVIDIA H200 sm_90`` for a GPU; ``cpu AVX512, 2 threads`` for a CPU.

    That is the widest instruction set that torch uses, and the number of threads that CPU kernels are made for.
    """
    import torch

    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} sm_{major}{minor}"
    return f"cpu {torch.backends.cpu.get_cpu_capability()}, {threads} threads"


def triton_version() -> str:
    """Triton's version, or an empty string where it is not installed (CPU builds)."""
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return ""


def transformers_version() -> str:
    """transformers' version, or an empty string where it is not installed."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_compiler() -> str | None:
    """The C++ compiler that inductor would call: ``CXX``, else g++; None when the machine has none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def compiler_version() -> str:
    """The first line that the C++ compiler says of itself; an empty string without one."""
    compiler = find_compiler()
    if compiler is None:
        return ""
    answer = subprocess.run(
        [compiler, "--version"],
        capture_output=True,
        text=True,
        timeout=30,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return answer.stdout.partition("\n")[0].strip()


def sources_digest(payload_root: Path) -> str:
    """16 hex digits over the names and contents of the compiled sources below ``payload_root``, and over transformers'
    version, whose layers the target is made of."""
    digest = hashlib.sha256(f"transformers {transformers_version()}\0".encode())
    for entry in COMPILED_SOURCES:
        path = payload_root / entry
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if file.is_file():
                digest.update(f"{file.relative_to(payload_root).as_posix()}\0".encode())
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def shape_facts(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a recipe that decides what is compiled: no paths of data, no learning rate, no step count."""
    chosen: dict[str, Any] = {}
    for section, names in SHAPE_FIELDS.items():
        value = recipe.get(section)
        if names is not None and isinstance(value, Mapping):
            value = {name: value.get(name) for name in names}
        chosen[section] = value
    return chosen


def shapes_digest(recipe: Mapping[str, Any]) -> str:
    """16 hex digits over :func:`shape_facts`."""
    return _digest(json.dumps(shape_facts(recipe), sort_keys=True, default=str).encode("ascii"))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
