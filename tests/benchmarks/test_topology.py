"""The benchmark of a whole job in one topology."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import topology
from benchmarks.made_up import JobResult
from payload.recipe import Recipe


def recipe(root: Path, targets: list[int], drafters: list[int]) -> Recipe:
    return topology.recipe_of("tiny", root, targets, drafters, steps=20, document=50, shard="ddp")


def job_of(step_s: float, waited_s: float) -> JobResult:
    """A job whose steps take ``step_s`` and wait ``waited_s`` each, logged as the trainer logs it."""
    lines = [
        {"event": "train", "step": step, "step_s": step_s, "transfer_wait_s": waited_s * step}
        for step in (1, 5, 10, 15, 20)
    ]
    return JobResult(0, "", [{"event": "first_step", "seconds": 9.0, "recompiles": 0}, *lines])


def test_shares_are_of_the_step_and_samples_are_documents(tmp_path: Path) -> None:
    ranks = [
        {"rank": 0, "target": True, "drafter": False, "features_s": 0.02, "memory_bytes": 5},
        {"rank": 1, "target": False, "drafter": True, "features_s": None, "memory_bytes": 7},
        {"rank": 2, "target": False, "drafter": True, "features_s": None, "memory_bytes": 7},
    ]
    found = topology.result_of(recipe(tmp_path, [0], [1, 2]), job_of(0.1, 0.01), ranks, document=50)
    assert found.step_ms == pytest.approx(100)
    # Two drafters, two rows each, five documents of 50 tokens in a row of 256.
    assert found.samples_per_s == pytest.approx(2 * 2 * 5 / 0.1)
    assert found.tokens_per_s == pytest.approx(2 * 2 * 256 / 0.1)
    assert found.transfer_share == pytest.approx(0.1)
    # The target makes the features of both micro-batches of a step.
    assert [one.busy_share for one in found.ranks] == pytest.approx([0.4, 0.9, 0.9])
    assert found.message_bytes == 2 * 256 * (12 + 2 * 64 * 4)
    assert "rank 0 (target): busy 40%, 20.0 ms" in topology.describe(found, "tiny", 50)


@pytest.mark.slow
def test_a_job_of_a_target_and_a_drafter_is_measured(tmp_path: Path) -> None:
    found = topology.measure(recipe(tmp_path, [0], [1]), tmp_path, 50, {"CUDA_VISIBLE_DEVICES": ""})
    assert found.samples_per_s > 0
    assert 0 < found.ranks[0].busy_share <= 1.2
    assert [one.role for one in found.ranks] == ["target", "drafter"]
