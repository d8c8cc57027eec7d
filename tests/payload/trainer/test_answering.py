"""Targets that answer the training prompts together: the same answers as one alone, stopped and resumed, or failed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from payload.agent.run_data import read_run_data
from payload.recipe import Recipe
from tests.payload.trainer.jobs import Job, run, started, tiny_recipe
from tests.payload.trainer.test_launch import impatient_rank, launched, output, ranks_of


def answering(target: Path, targets: list[int], **overrides: Any) -> Recipe:
    """64 prompts in batches of 5; one more rank is a drafter, which waits."""
    settings = {
        "data__regenerate": True,
        "data__regenerate_batch": 5,
        "data__regenerate_max_new_tokens": 12,
        "train__steps": 2,
        "topology__targets": targets,
        "topology__drafters": [len(targets)],
    }
    return tiny_recipe(target, **settings | overrides)


def answers_of(run_dir: Path) -> list[Path]:
    return sorted((run_dir.parent.parent / "answers").glob("*.jsonl"))


def packed_of(run_dir: Path) -> dict[str, Any]:
    [packed] = (run_dir.parent.parent / "packed").glob("*/packed.safetensors")
    return {name: tensor.tolist() for name, tensor in load_file(packed).items()}


@pytest.fixture(scope="module")
def alone(tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[float, Job]:
    jobs = {}
    for temperature in (0.0, 1.0):
        folder = tmp_path_factory.mktemp("alone") / "runs" / "a"
        recipe = answering(tiny_target_folder, [0], data__regenerate_temperature=temperature)
        jobs[temperature] = run(folder, recipe)
        assert set(jobs[temperature].wait()) == {0}, jobs[temperature].output()
    return jobs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_targets_answer_what_one_would_and_neither_twice(
    tiny_target_folder: Path, alone: dict[float, Job], tmp_path: Path, temperature: float
) -> None:
    recipe = answering(tiny_target_folder, [0, 1], data__regenerate_temperature=temperature)
    job = run(tmp_path / "runs" / "a", recipe)
    assert set(job.wait()) == {0}, job.output()
    shares = [path.read_text().splitlines() for path in answers_of(job.run_dir)]
    keys = [json.loads(line)["key"] for share in shares for line in share]
    assert len(shares) == 2
    assert len(keys) == len(set(keys)) == 64
    assert packed_of(job.run_dir) == packed_of(alone[temperature].run_dir)
    assert job.losses() == pytest.approx(alone[temperature].losses(), rel=1e-5)
    assert "regenerate: 64 answered, 0 kept from before" in job.output()


def test_a_run_notes_which_data_it_uses_the_answers_before_they_are_all_there(
    tiny_target_folder: Path, alone: dict[float, Job], tmp_path: Path
) -> None:
    run_dir = alone[0.0].run_dir
    root = run_dir.parent.parent
    noted = read_run_data(run_dir)
    assert noted is not None
    assert noted.complete
    assert noted.names.keys() == {"answers", "packed"}
    assert answers_of(run_dir) == [root / "answers" / f"{noted.names['answers']}.jsonl"]
    assert (root / "packed" / noted.names["packed"] / "packed.safetensors").is_file()
    recipe = answering(tiny_target_folder, [0], data__regenerate_temperature=1.0)
    with started(tmp_path / "runs" / "a", recipe) as job:
        await_answers(job.run_dir, 1)
        answering_run = read_run_data(job.run_dir)
    assert answering_run is not None
    assert (answering_run.complete, answering_run.names.keys()) == (False, {"answers"})
    assert answers_of(job.run_dir)[0].stem == answering_run.names["answers"]


def await_answers(run_dir: Path, number: int) -> None:
    deadline = time.monotonic() + 60
    while number_of_answers(run_dir) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def number_of_answers(run_dir: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in answers_of(run_dir))


@pytest.mark.slow
@pytest.mark.parametrize("told", ["target", "drafter", "all"])
def test_a_stop_of_any_rank_ends_all_and_the_answers_so_far_are_kept_whoever_goes_on(
    tiny_target_folder: Path, tmp_path: Path, told: str
) -> None:
    many = {"data__train_rows": 240, "data__regenerate_max_new_tokens": 60, "train__steps": 1}
    first = tmp_path / "runs" / "a"
    with launched(first, answering(tiny_target_folder, [0, 1], **many)) as process:
        await_answers(first, 10)
        ranks = ranks_of(process.pid)
        begun = time.monotonic()
        os.kill({"target": ranks[1], "drafter": ranks[2], "all": process.pid}[told], signal.SIGTERM)
        assert process.wait(30) == 143, output(first)
        assert time.monotonic() - begun < 15
    assert 10 <= number_of_answers(first) < 225
    assert "Told to stop" in output(first)
    assert "error:" not in output(first)
    assert "Traceback" not in output(first)
    if told == "target":
        kept = number_of_answers(first)
        with started(tmp_path / "runs" / "b", answering(tiny_target_folder, [0], **many)) as on:
            # One batch between others may have been cut short: what is kept after it is counted with the next.
            await_answers(first, kept + 15)
        assert f" answered, {kept} kept from before" in on.output()


def test_ranks_that_were_killed_leave_answers_that_another_split_goes_on_with(
    tiny_target_folder: Path, alone: dict[float, Job], tmp_path: Path
) -> None:
    recipe = answering(tiny_target_folder, [0, 1], data__regenerate_temperature=1.0)
    with started(tmp_path / "runs" / "a", recipe) as job:
        await_answers(job.run_dir, 10)
        job.kill(signal.SIGKILL)
        job.wait()
    on = run(
        tmp_path / "runs" / "b", answering(tiny_target_folder, [0, 1, 2], data__regenerate_temperature=1.0)
    )
    assert set(on.wait()) == {0}, on.output()
    assert packed_of(on.run_dir) == packed_of(alone[1.0].run_dir)


def test_a_target_that_fails_while_it_answers_ends_all_ranks_with_one_word(
    tiny_target_folder: Path, alone: dict[float, Job], tmp_path: Path
) -> None:
    recipe = answering(tiny_target_folder, [0, 1])
    name = answers_of(alone[0.0].run_dir)[0].stem
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / f"{name}.1.jsonl").symlink_to(tmp_path / "no" / "where")
    with started(tmp_path / "runs" / "a", recipe, rank=impatient_rank) as job:
        assert set(job.wait()) == {1}, job.output()
    assert job.output().count("error:") == 1, job.output()
    assert "error: rank 1 of 3 (target): The answers cannot be written to" in job.output()
    assert "Traceback" not in job.output()


def test_answers_of_before_that_lie_in_one_file_are_kept_and_none_that_is_not_asked_for_is_learned(
    tiny_target_folder: Path, alone: dict[float, Job], tmp_path: Path
) -> None:
    (tmp_path / "answers").mkdir()
    [made] = answers_of(alone[0.0].run_dir)
    lines = made.read_text().splitlines(keepends=True)
    stranger = json.dumps({**json.loads(lines[0]), "key": "nobody's"}) + "\n"
    (tmp_path / "answers" / made.name).write_text("".join([stranger, *reversed(lines[:40])]))
    job = run(tmp_path / "runs" / "a", answering(tiny_target_folder, [0, 1]))
    assert set(job.wait()) == {0}, job.output()
    assert "24 answered, 40 kept from before" in job.output()
    assert packed_of(job.run_dir) == packed_of(alone[0.0].run_dir)
    shutil.rmtree(tmp_path / "answers")
