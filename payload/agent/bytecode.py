"""The agent's bytecode: written once, when a release is put in place, and whole or not at all.

Python itself would write it at the first call, and on a full disk leave a file that is cut off (before 3.12.8 and
3.13.1): from then on no call of the agent would start.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import py_compile
import shutil
from pathlib import Path

_HEADER_BYTES = 16


def compile_agent(payload_folder: Path) -> None:
    """Write the bytecode of the agent in ``payload_folder``, for the Python that runs now; none if that fails."""
    agent = payload_folder / "agent"
    _forget(payload_folder)
    try:
        for source in [
            payload_folder / "__init__.py",
            payload_folder / "errors.py",
            *sorted(agent.glob("*.py")),
        ]:
            compiled = py_compile.compile(str(source), doraise=True)
            _check_and_sync(Path(str(compiled)))
    except (OSError, EOFError, ValueError, TypeError, py_compile.PyCompileError):
        # The agent works without, some tens of milliseconds slower.
        _forget(payload_folder)


def _check_and_sync(compiled: Path) -> None:
    with compiled.open("rb") as file:
        marshal.loads(file.read()[_HEADER_BYTES:])
        os.fsync(file.fileno())


def _forget(payload_folder: Path) -> None:
    for folder in (payload_folder, payload_folder / "agent"):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder / "__pycache__")
