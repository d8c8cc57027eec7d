"""The benchmark of the link between two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_two_ranks_measure_their_link_and_only_the_receiver_tells() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "benchmarks.link", "--repeats", "3", "--json"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rank"] == 1
    assert found["link_bytes_per_s"] > 0
    assert found["all_reduce_bytes_per_s"] > 0
    assert found["products_slower_beside_a_waiting_receive"] > 0
