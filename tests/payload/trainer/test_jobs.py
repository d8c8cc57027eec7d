"""Whole jobs: every split of the roles learns alike, nothing hangs, and an interrupted run goes on exactly."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from payload.agent.run_data import read_run_data
from payload.drafter.checkpoint import load_drafter
from payload.trainer.checkpoint import newest_checkpoint
from tests.payload.trainer.jobs import Job, rank_of_a_job, run, started, tiny_recipe


def topology(targets: list[int], drafters: list[int]) -> dict[str, Any]:
    return {"topology__targets": targets, "topology__drafters": drafters}


def final_weights(job: Job) -> dict[str, torch.Tensor]:
    newest = sorted((job.run_dir / "checkpoints").glob("step-*"))[-1]
    return load_file(newest / "trainer.safetensors")


def test_one_rank_with_both_roles_trains_checkpoints_and_exports(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    job = run(tmp_path, tiny_recipe(tiny_target_folder, data__eval=["demo"], data__eval_rows=2))
    assert job.wait() == [0], job.output()
    assert list(job.losses()) == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in job.lines("eval")] == [0, 6]
    assert job.lines("end")[0]["outcome"] == "finished"
    folder = tmp_path / "checkpoints" / "step-000006"
    assert load_drafter(folder / "drafter")[1].block_size == 4
    assert "finished" in job.output()


def test_separate_ranks_compute_the_very_losses_of_one_rank(tiny_target_folder: Path, tmp_path: Path) -> None:
    together = run(tmp_path / "one", tiny_recipe(tiny_target_folder))
    apart = run(tmp_path / "two", tiny_recipe(tiny_target_folder, **topology([0], [1])))
    assert apart.wait() == [0, 0], apart.output()
    assert apart.losses() == together.losses()


def test_micro_batches_on_one_drafter_and_drafters_side_by_side_learn_alike(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    accumulated = run(tmp_path / "acc", tiny_recipe(tiny_target_folder, train__accumulation=2))
    parallel = run(tmp_path / "par", tiny_recipe(tiny_target_folder, **topology([0], [0, 1])))
    assert parallel.wait() == [0, 0], parallel.output()
    assert list(parallel.losses().values()) == pytest.approx(list(accumulated.losses().values()), rel=1e-4)


@pytest.mark.parametrize(
    ("targets", "drafters", "accumulation"),
    [
        pytest.param([0, 1], [2], 2, marks=pytest.mark.slow),
        pytest.param([0], [1, 2], 2, marks=pytest.mark.slow),
        # Features travel between ranks 0 and 1 in both directions, in the second case more than fit in an outbox.
        pytest.param([0, 1, 2], [0, 1], 2, marks=pytest.mark.slow),
        pytest.param([0, 1, 2], [0, 1], 12, marks=pytest.mark.slow),
        ([0, 1], [1, 0], 4),
        ([0, 1], [1, 2], 2),
    ],
)
def test_any_split_of_roles_ends_and_learns_from_the_same_micro_batches(
    tiny_target_folder: Path, tmp_path: Path, targets: list[int], drafters: list[int], accumulation: int
) -> None:
    recipe = tiny_recipe(
        tiny_target_folder,
        train__accumulation=accumulation,
        train__steps=4,
        data__eval=["demo"],
        data__eval_rows=3,
        train__eval_every=2,
        **topology(targets, drafters),
    )
    job = run(tmp_path / "job", recipe)
    assert set(job.wait()) == {0}, job.output()
    alone = run(
        tmp_path / "alone",
        tiny_recipe(tiny_target_folder, train__steps=4, train__accumulation=accumulation * len(drafters)),
    )
    assert list(job.losses().values()) == pytest.approx(list(alone.losses().values()), rel=1e-4)
    assert [line["step"] for line in job.lines("eval")] == [0, 2, 4]
    ranks = json.loads((job.run_dir / "ranks.json").read_text())
    assert [one["rank"] for one in ranks if one["target"]] == targets
    assert [one["rank"] for one in ranks if one["drafter"]] == sorted(drafters)
    assert all((one["features_s"] is not None) == one["target"] for one in ranks)


@pytest.mark.slow
def test_sharded_drafters_learn_what_whole_ones_learn_and_resume(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    sharded = {"train__shard": "fsdp2", "train__checkpoint_every": 3, **topology([0], [0, 1])}
    job = run(tmp_path / "job", tiny_recipe(tiny_target_folder, **sharded))
    assert set(job.wait()) == {0}, job.output()
    alone = run(tmp_path / "alone", tiny_recipe(tiny_target_folder, train__accumulation=2))
    assert list(job.losses().values()) == pytest.approx(list(alone.losses().values()), rel=1e-3)
    shutil.rmtree(tmp_path / "job" / "checkpoints" / "step-000006")
    losses = job.losses()
    (tmp_path / "job" / "metrics.jsonl").unlink()
    again = run(tmp_path / "job", tiny_recipe(tiny_target_folder, **sharded))
    assert again.losses() == {step: losses[step] for step in (4, 5, 6)}, again.output()


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["ddp", "fsdp2"])
def test_five_targets_feed_three_drafters(tiny_target_folder: Path, tmp_path: Path, shard: str) -> None:
    recipe = tiny_recipe(
        tiny_target_folder,
        train__accumulation=2,
        train__shard=shard,
        data__eval=["demo"],
        data__eval_rows=5,
        **topology([0, 1, 2, 3, 4], [5, 6, 7]),
    )
    job = run(tmp_path / "job", recipe, timeout_s=110)
    assert set(job.wait()) == {0}, job.output()
    alone = run(tmp_path / "alone", tiny_recipe(tiny_target_folder, train__accumulation=6))
    assert list(job.losses().values()) == pytest.approx(list(alone.losses().values()), rel=1e-3)


@pytest.mark.parametrize(
    ("targets", "drafters"), [([0, 1], [0, 1]), pytest.param([0], [1], marks=pytest.mark.slow)]
)
def test_a_run_killed_at_a_random_step_resumes_with_bit_equal_losses(
    tiny_target_folder: Path, tmp_path: Path, targets: list[int], drafters: list[int]
) -> None:
    recipe = tiny_recipe(
        tiny_target_folder,
        data__eval=["demo"],
        data__eval_rows=2,
        train__steps=24,
        train__accumulation=2,
        train__checkpoint_every=3,
        train__eval_every=5,
        **topology(targets, drafters),
    )
    whole = run(tmp_path / "whole", recipe)
    killed_after = random.randrange(7, 20)
    with started(tmp_path / "killed", recipe) as job:
        job.wait_for_step(killed_after)
        job.kill(signal.SIGKILL)
        job.wait()
    resumed = run(tmp_path / "killed", recipe)
    assert resumed.wait() == [0, 0], resumed.output()
    assert "resuming after step" in resumed.output()
    assert resumed.losses() == whole.losses()
    for measured in ("accepted_length", "tokens"):
        before, after = ({e["step"]: e[measured] for e in job.lines("eval")} for job in (whole, resumed))
        assert before == after
    assert resumed.lines("train")[-1]["tokens_seen"] == whole.lines("train")[-1]["tokens_seen"]
    before, after = final_weights(whole), final_weights(resumed)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_stop_whose_last_checkpoint_cannot_be_written_is_a_failure(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    tmp_path.joinpath("checkpoints").write_text("a file where the folder should be")
    with started(tmp_path, tiny_recipe(tiny_target_folder, train__steps=4000, **topology([0], [1]))) as job:
        job.wait_for_step(3)
        job.kill(signal.SIGTERM)
        assert job.wait() == [1, 1], job.output()
    assert "error: rank 1 of 2 (drafter): The checkpoint of step" in job.output()
    assert "Traceback" not in job.output()


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_checkpoint_that_is_being_written_is_not_lost_when_another_rank_fails(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    """Longer than a rank may take to leave once another has failed."""
    recipe = tiny_recipe(
        tiny_target_folder, train__steps=4000, train__checkpoint_every=2, **topology([0], [1])
    )
    with started(tmp_path, recipe, rank=_slow_disk) as job:
        job.wait_for_step(4)
        os.kill(job.processes[0].pid or 0, signal.SIGKILL)
        job.processes[1].join(60)
        assert job.processes[1].exitcode == 1, job.output()
    whole = newest_checkpoint(tmp_path / "checkpoints", pytest.fail)
    assert whole is not None
    assert not list((tmp_path / "checkpoints").glob(".step-*"))


def _slow_disk(rank: int, world_size: int, port: int, run_dir: Path) -> None:
    """A rank on which a checkpoint takes eight seconds."""
    from payload.trainer import checkpoint

    save = checkpoint.save_file

    def slowly(*arguments: Any) -> None:
        time.sleep(8)
        save(*arguments)

    checkpoint.save_file = slowly  # type: ignore[assignment]
    rank_of_a_job(rank, world_size, port, run_dir)


def test_sigterm_checkpoints_and_the_run_goes_on_from_there(tiny_target_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tiny_target_folder, train__steps=400, **topology([0], [1]))
    with started(tmp_path, recipe) as job:
        job.wait_for_step(5)
        job.kill(signal.SIGTERM)
        assert job.wait(20) == [143, 143], job.output()
    ended = job.lines("end")[0]
    assert ended["outcome"] == "stopped"
    assert (tmp_path / "checkpoints" / f"step-{ended['step']:06d}" / "manifest.json").is_file()
    with started(tmp_path, recipe) as again:
        again.wait_for_step(ended["step"] + 1)
    assert f"resuming after step {ended['step']}" in again.output()


@pytest.mark.slow
def test_sigterm_to_the_target_alone_stops_all(tiny_target_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tiny_target_folder, train__steps=2000, **topology([0], [1]))
    with started(tmp_path, recipe) as job:
        job.wait_for_step(3)
        job.processes[0].terminate()
        assert job.wait(20) == [143, 143], job.output()


def test_a_broken_checkpoint_is_passed_over_with_a_warning(tiny_target_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tiny_target_folder, train__checkpoint_every=2)
    first = run(tmp_path, recipe)
    with (tmp_path / "checkpoints" / "step-000006" / "trainer.safetensors").open("r+b") as file:
        file.seek(200)
        file.write(b"\xff\xff")
    again = run(tmp_path, recipe)
    assert again.wait() == [0]
    assert "warning: the checkpoint of step 6 is not used" in again.output()
    assert "resuming after step 4" in again.output()
    assert again.losses() == first.losses()


def test_a_new_run_goes_on_from_the_checkpoint_of_another(tiny_target_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tiny_target_folder, train__checkpoint_every=4)
    first = run(tmp_path / "runs" / "a", recipe)
    shutil.rmtree(tmp_path / "runs" / "a" / "checkpoints" / "step-000006")
    second = run(tmp_path / "runs" / "b", recipe, resume_from="../a")
    assert second.losses() == {step: first.losses()[step] for step in (5, 6)}, second.output()
    without = run(tmp_path / "runs" / "c", recipe, resume_from="../nothing")
    assert without.wait() == [1]
    assert "no usable checkpoint" in without.output()


def test_another_recipe_does_not_resume_a_run(tiny_target_folder: Path, tmp_path: Path) -> None:
    run(tmp_path, tiny_recipe(tiny_target_folder))
    other = run(tmp_path, tiny_recipe(tiny_target_folder, optim__lr=0.5))
    assert other.wait() == [1]
    assert "made by another recipe" in other.output()
    assert "Traceback" not in other.output()


def test_a_job_of_the_wrong_size_says_which_size_it_needs(tiny_target_folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tiny_target_folder)
    with started(tmp_path, recipe) as job:
        pass
    wrong = json.loads((tmp_path / "spec.json").read_text())
    wrong["recipe"]["topology"]["drafters"] = [1]
    (tmp_path / "spec.json").write_text(json.dumps(wrong))
    from tests.payload.trainer import jobs

    process = jobs.context.Process(target=jobs.rank_of_a_job, args=(0, 1, 0, tmp_path))
    process.start()
    process.join(60)
    assert process.exitcode == 1
    assert "--nproc-per-node 2" in job.output()


def test_targets_without_finite_features_fail_with_words(tiny_target_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder)
    torch.nn.init.constant_(model.model.layers[0].mlp.down_proj.weight, float("nan"))
    model.save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(tiny_target_folder).save_pretrained(tmp_path / "target")
    with started(tmp_path / "run", tiny_recipe(tmp_path / "target", **topology([0], [1]))) as job:
        # Under torchrun the failure of one rank ends the others.
        job.processes[1].join(60)
        assert job.processes[1].exitcode == 1, job.output()
    assert "not finite" in job.output()
    assert "bfloat16" in job.output()


@pytest.mark.parametrize(
    "kind", ["kl", pytest.param("ce", marks=pytest.mark.slow), pytest.param("dpace", marks=pytest.mark.slow)]
)
def test_features_from_disk_teach_what_live_features_teach(
    tiny_target_folder: Path, tmp_path: Path, kind: str
) -> None:
    live = run(tmp_path / "live", tiny_recipe(tiny_target_folder, train__steps=3, loss__kind=kind))
    stored = tiny_recipe(tiny_target_folder, train__steps=3, loss__kind=kind, data__features="offline")
    from_disk = run(tmp_path / "disk", stored)
    assert from_disk.wait() == [0], from_disk.output()
    assert "features: 0.0 GB" in from_disk.output()
    assert list(from_disk.losses().values()) == pytest.approx(list(live.losses().values()), rel=1e-5)
    noted = read_run_data(from_disk.run_dir)
    assert noted is not None
    assert (from_disk.run_dir / "features" / noted.names["features"] / "manifest.json").is_file()


def test_answers_are_generated_once_and_used_by_the_next_run(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(
        tiny_target_folder, train__steps=1, data__regenerate=True, data__regenerate_max_new_tokens=6
    )
    first = run(tmp_path / "runs" / "a", recipe)
    second = run(tmp_path / "runs" / "b", recipe)
    assert second.wait() == [0], second.output()
    assert "64 answered" in first.output()
    assert "0 answered, 64 kept" in second.output()
    assert first.losses() == second.losses()
