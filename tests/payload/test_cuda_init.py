"""Whether CUDA starts: on a machine without a GPU it says why not, on one with GPUs it computes on each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]


def ask(**environment: str) -> dict[str, Any]:
    """The module as the agent calls it."""
    done = subprocess.run(
        [sys.executable, "-m", "payload.cuda_init"],
        input=b'{"protocol": 1, "nonce": "ab", "root": "/opt/dflash"}\n',
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        timeout=110,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])["result"]
    assert isinstance(found, dict)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_told() -> None:
    found = ask()
    assert found["available"] is False
    assert found["devices"] == []
    assert ("without CUDA" if torch.version.cuda is None else "RuntimeError") in found["error"]


@pytest.mark.gpu
def test_every_visible_gpu_computes() -> None:
    found = ask()
    assert found["available"] is True
    assert found["error"] is None
    assert len(found["devices"]) == torch.cuda.device_count()
    assert {device["error"] for device in found["devices"]} == {None}
    assert all(device["capability"].startswith("sm_") for device in found["devices"])


@pytest.mark.gpu
def test_gpus_that_are_hidden_are_no_gpus() -> None:
    found = ask(CUDA_VISIBLE_DEVICES="")
    assert found["error"] or not found["devices"]
