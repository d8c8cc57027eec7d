from __future__ import annotations

from pathlib import Path

import pytest

from tests.payload.trainer.jobs import save_tiny_target


@pytest.fixture(scope="session")
def tiny_target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))
