"""Targets that compute the training set's features together: what one would compute, also after a kill or a stop."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from payload.data import feature_cache
from payload.data.feature_cache import FeatureCache
from payload.recipe import Recipe
from payload.trainer.program import TargetProgram
from tests.payload.trainer.jobs import Job, rank_of_a_job, run, started, tiny_recipe


def stored(target: Path, targets: int, **overrides: Any) -> Recipe:
    """One more rank is a drafter, which waits."""
    topology = {"topology__targets": [*range(targets)], "topology__drafters": [targets]}
    return tiny_recipe(target, data__features="offline", train__steps=3, **topology | overrides)


def a_row_a_shard(rank: int, world_size: int, port: int, run_dir: Path) -> None:
    feature_cache._SHARD_BYTES = 1
    rank_of_a_job(rank, world_size, port, run_dir)


def a_row_a_shard_slowly(rank: int, world_size: int, port: int, run_dir: Path) -> None:
    produce = TargetProgram.produce

    def slow(program: TargetProgram, *arguments: Any) -> Any:
        time.sleep(0.1)
        return produce(program, *arguments)

    setattr(TargetProgram, "produce", slow)  # noqa: B010 - a process of its own
    a_row_a_shard(rank, world_size, port, run_dir)


def shards_of(run_dir: Path) -> list[Path]:
    return sorted((run_dir.parent.parent / "features").glob("[!.]*/*.safetensors"))


def features_of(run_dir: Path) -> list[torch.Tensor]:
    [folder] = {shard.parent for shard in shards_of(run_dir)}
    cache = FeatureCache(folder)
    return [cache.read(row)[0] for row in range(cache.shape.rows)]


@pytest.fixture(scope="module")
def alone(tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run(tmp_path_factory.mktemp("alone") / "runs" / "a", stored(tiny_target_folder, 1))


def assert_the_same(job: Job, alone: Job) -> None:
    assert set(job.wait()) == {0}, job.output()
    found, expected = features_of(job.run_dir), features_of(alone.run_dir)
    assert len(found) == len(expected) > 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert job.losses() == pytest.approx(alone.losses(), rel=1e-5)


def test_two_targets_compute_what_one_would(tiny_target_folder: Path, alone: Job, tmp_path: Path) -> None:
    with started(tmp_path / "runs" / "a", stored(tiny_target_folder, 2), a_row_a_shard) as job:
        assert_the_same(job, alone)
    with started(tmp_path / "runs" / "b", stored(tiny_target_folder, 2), a_row_a_shard) as again:
        assert_the_same(again, alone)
    assert "features: using" in again.output()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_was_computed_before_the_end_came_is_used_by_another_split(
    tiny_target_folder: Path, alone: Job, tmp_path: Path, number: signal.Signals
) -> None:
    first = tmp_path / "runs" / "a"
    with started(first, stored(tiny_target_folder, 2), a_row_a_shard_slowly) as job:
        deadline = time.monotonic() + 60
        while len(list((tmp_path / "features").glob(".*/*.safetensors"))) < 2:
            assert time.monotonic() < deadline, job.output()
            time.sleep(0.01)
        job.kill(number)
        statuses = job.wait()
    assert shards_of(first) == []
    if number == signal.SIGTERM:
        assert set(statuses) == {143}, job.output()
        assert "Told to stop" in job.output()
        assert "Traceback" not in job.output()
    kept = len(list((tmp_path / "features").glob(".*.partial/*.safetensors")))
    assert kept >= 2
    with started(tmp_path / "runs" / "b", stored(tiny_target_folder, 1), a_row_a_shard) as on:
        assert_the_same(on, alone)
    assert f"rows, {kept} kept from before" in on.output()
