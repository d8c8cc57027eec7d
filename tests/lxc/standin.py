"""A venv that costs seconds: each package that the payload pins as an empty wheel, and a torchrun for any job.

The job of a run is the Python program in ``STANDIN_JOB`` of its environment, so that the real commands, the real agent
and the real uv can be put to work without a gigabyte of torch.
"""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement

from tests.wheels import build_wheel

TORCH_VERSION = "2.13.0"
_REQUIREMENTS = Path(__file__).resolve().parents[2] / "payload" / "requirements.txt"
_MODULES = {"pyyaml": "yaml"}
_CONTAINER_PYTHON = {"python_full_version": "3.11.2", "python_version": "3.11"}
_TORCHRUN = """\
import os


def parse_args(arguments):
    return arguments


def run(arguments):
    exec(compile(os.environ["STANDIN_JOB"], "job", "exec"), {"__name__": "__main__"})
"""
# What payload.trainer.launch takes from torch.
_TORCH = {
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
        "torch/__init__.py": f"from torch import version\n__version__ = {version!r}\n",
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
            module = _MODULES.get(wanted.name, wanted.name).replace("-", "_")
            build_wheel(folder, wanted.name.replace("-", "_"), pin.version, {f"{module}.py": ""})
    return folder
