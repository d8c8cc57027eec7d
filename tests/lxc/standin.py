"""A venv that costs seconds: the payload's packages as empty wheels, but PyYAML, and a torchrun for any job.

The job of a run is the Python program in ``STANDIN_JOB`` of its environment, so that the real commands, the real agent
and the real uv can be put to work without a gigabyte of torch.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from packaging.requirements import Requirement

from tests.wheels import build_wheel

TORCH_VERSION = "2.13.0"
_REQUIREMENTS = Path(__file__).resolve().parents[2] / "payload" / "requirements.txt"
_CONTAINER_PYTHON = {"python_full_version": "3.11.2", "python_version": "3.11"}
_TORCHRUN = """\
import os


def parse_args(arguments):
    return arguments


def run(arguments):
    exec(compile(os.environ["STANDIN_JOB"], "job", "exec"), {"__name__": "__main__"})
"""
# What payload.trainer.launch takes from torch, and the question whether a compile cache is warm.
_TORCH = {
    "torch/cuda.py": "def is_available():\n    return False\n",
    "torch/backends/__init__.py": "",
    "torch/backends/cpu.py": "def get_cpu_capability():\n    return 'none'\n",
    "torch/distributed/__init__.py": "",
    "torch/distributed/run.py": _TORCHRUN,
    "torch/distributed/elastic/__init__.py": "",
    "torch/distributed/elastic/multiprocessing/__init__.py": "",
    "torch/distributed/elastic/multiprocessing/api.py": "class SignalException(Exception): ...\n",
    "torch/distributed/elastic/multiprocessing/errors.py": (
        "class ChildFailedError(Exception): ...\n\n\nclass ProcessFailure: ...\n"
    ),
}


def build_wheels(folder: Path) -> Path:
    """All of them in ``folder``, for the Python of the bed's containers; returns it."""
    version = f"{TORCH_VERSION}+cpu"
    torch = {
        "torch/__init__.py": f"import torch.backends.cpu\nfrom torch import cuda, version\n__version__ = {version!r}\n",
        "torch/version.py": f"cuda = None\ngit_version = {'c0ffee' * 6 + 'c0ff'!r}\n",
        **_TORCH,
    }
    build_wheel(folder, "torch", version, torch)
    for line in _REQUIREMENTS.read_text().splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate(_CONTAINER_PYTHON):
            [pin] = wanted.specifier
            name = wanted.name.replace("-", "_")
            build_wheel(folder, name, pin.version, _yaml() if name == "pyyaml" else {f"{name}.py": ""})
    return folder


def _yaml() -> dict[str, str]:
    """PyYAML itself, without its part in C: recipes are read with it before anything else is asked for."""
    source = Path(yaml.__file__).parent
    return {f"yaml/{path.name}": path.read_text(encoding="utf-8") for path in source.glob("*.py")}
