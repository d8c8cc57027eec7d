from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from payload.agent import state
from payload.agent.layout import Layout
from payload.agent.processes import ProcessId, end, is_alive
from payload.errors import PayloadError
from tests.payload.agent.container import FakeContainer, make_container
from tests.payload.agent.wheels import make_torch, make_wheel


@pytest.fixture
def container(tmp_path: Path) -> Iterator[FakeContainer]:
    """A container of its own for each test; afterwards nothing of its runs is left.

    Its agent runs by the Python that the environment variable AGENT_PYTHON names (any from 3.9), else by this one.
    """
    made = make_container(tmp_path, os.environ.get("AGENT_PYTHON", sys.executable))
    yield made
    layout = Layout.at(str(made.root))
    for run_id in state.run_ids(layout):
        with contextlib.suppress(PayloadError):
            end(partial(_left, layout, state.load(layout.run(run_id))), 0.0)


def _left(layout: Layout, run: state.RunState) -> list[ProcessId]:
    own = [run.supervisor] if run.supervisor is not None and is_alive(run.supervisor) else []
    return state.processes(layout, run) + own


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder of wheels: torch, and a package that needs it."""
    folder = tmp_path / "wheels"
    make_torch(folder)
    make_wheel(folder, "needy", "1.0", {"needy.py": "import torch\n"}, requires=("torch>=2",))
    return folder
