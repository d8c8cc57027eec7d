"""Whole jobs on targets and data of other kinds: GGUF, untied heads, rows that not every rank can learn from."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from payload.drafter.checkpoint import load_config
from payload.recipe import Recipe
from tests.payload.tiny_gguf import write_gguf
from tests.payload.trainer.jobs import (
    run,
    save_tiny_target,
    started,
    tiny_causal_lm,
    tiny_recipe,
    tiny_tokenizer,
)
from tests.payload.trainer.test_launch import impatient_rank

STRANGE_TOKEN = 300
LENGTH = 32


def test_a_gguf_file_is_a_whole_target_with_its_tokenizer_and_template(tmp_path: Path) -> None:
    words = tiny_tokenizer()
    (tmp_path / "model").mkdir()
    write_gguf(tmp_path / "model" / "tiny.gguf", tiny_causal_lm("llama", len(words)), words)
    recipe = tiny_recipe(
        tmp_path / "model",
        target__gguf_file="tiny.gguf",
        drafter__mask_token_id=3,
        data__eval=["demo"],
        data__eval_rows=2,
        train__steps=2,
    )
    job = run(tmp_path / "run", recipe)
    assert job.wait() == [0], job.output()
    assert job.lines("eval")[-1]["identical"] == 2
    assert load_config(tmp_path / "run" / "checkpoints" / "step-000002" / "drafter").mask_token_id == 3


@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_a_head_of_its_own_and_a_teacher_reach_the_drafters_of_other_ranks(tmp_path: Path, kind: str) -> None:
    words = tiny_tokenizer()
    tiny_causal_lm("qwen2", len(words), tied=False).save_pretrained(tmp_path / "target")
    words.save_pretrained(tmp_path / "target")
    together = run(tmp_path / "one", tiny_recipe(tmp_path / "target", train__steps=3, loss__kind=kind))
    apart = {"topology__targets": [0], "topology__drafters": [1]}
    separate = run(
        tmp_path / "two", tiny_recipe(tmp_path / "target", train__steps=3, loss__kind=kind, **apart)
    )
    assert separate.wait() == [0, 0], separate.output()
    assert separate.losses() == together.losses()


@pytest.fixture(scope="module")
def fragile_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that is not finite wherever ``STRANGE_TOKEN`` was read before."""
    folder = tmp_path_factory.mktemp("fragile")
    words = tiny_tokenizer()
    model = tiny_causal_lm("qwen3", len(words), tied=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[STRANGE_TOKEN] = math.nan
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def row(seed: int, kind: str) -> dict[str, Any]:
    """A document that fills a packed row by itself; its first four tokens are a prompt."""
    ids = random.Random(seed).choices(range(4, STRANGE_TOKEN), k=LENGTH)
    mask = [index >= 4 for index in range(LENGTH)]
    if kind == "not finite":
        ids[0] = STRANGE_TOKEN
    if kind == "no anchor":
        mask = [kept and index % 2 == 0 for index, kept in enumerate(mask)]
    return {"input_ids": ids, "loss_mask": mask}


@pytest.mark.parametrize(
    ("kinds", "skipped"),
    [
        (["whole", "not finite"] * 4, 4),
        (["whole", "no anchor"] * 4, 0),
        (["whole"], 0),
    ],
)
def test_ranks_that_have_nothing_to_learn_from_do_not_hold_up_the_others(
    fragile_target: Path, tmp_path: Path, kinds: list[str], skipped: int
) -> None:
    """One epoch of eight rows for two drafters; what counts is what a single drafter would count."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row(seed, kind)) + "\n" for seed, kind in enumerate(kinds)))
    settings: dict[str, Any] = {
        "data": {"train": [str(data)], "max_length": LENGTH},
        "train__batch_size": 1,
        "train__steps": 4,
    }
    two = {"topology__targets": [0], "topology__drafters": [0, 1]}
    parallel = run(tmp_path / "two", tiny_recipe(fragile_target, **settings, **two))
    assert parallel.wait() == [0, 0], parallel.output()
    alone = run(tmp_path / "one", tiny_recipe(fragile_target, train__accumulation=2, **settings))
    assert sum(line["skipped_micro_batches"] for line in parallel.lines("train")) == skipped
    found, expected = ([line["loss"] for line in job.lines("train")] for job in (parallel, alone))
    assert [loss is None for loss in found] == [loss is None for loss in expected], "nothing counted"
    learned = [loss for loss in found if loss is not None]
    assert parallel.lines("end")[0]["last_loss"] == learned[-1], "of the last that counted"
    assert learned
    assert learned == pytest.approx([loss for loss in expected if loss is not None], rel=1e-4)
    assert ("not finite" in parallel.output()) == bool(skipped)


def test_other_weights_in_the_same_folder_are_another_target(tmp_path: Path) -> None:
    """Neither its answers nor its features are those of before, and no run of before goes on with it."""
    target = save_tiny_target(tmp_path / "target")
    settings: dict[str, Any] = {
        "data__features": "offline",
        "data__regenerate": True,
        "data__regenerate_max_new_tokens": 6,
        "train__steps": 2,
    }
    first = run(tmp_path / "runs" / "a", tiny_recipe(target, **settings))
    same = run(tmp_path / "runs" / "b", tiny_recipe(target, **settings))
    assert same.losses() == first.losses()
    assert "data: using" not in first.output()
    assert "data: using" in same.output()
    assert "features: using" in same.output()
    tiny_causal_lm("qwen3", len(tiny_tokenizer()), seed=1).save_pretrained(target)
    other = run(tmp_path / "runs" / "c", tiny_recipe(target, **settings))
    assert "64 answered, 0 kept" in other.output()
    assert "features: using" not in other.output()
    resumed = run(tmp_path / "runs" / "d", tiny_recipe(target, **settings), resume_from="../a")
    assert resumed.wait() == [1]
    assert "another target" in resumed.output()


UNUSABLE: list[Any] = [
    {"input_ids": 5},
    {"input_ids": [5] * 8 + [10**6]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"messages": [{"role": "user", "content": "How many?"}], "tools": [{"name": "count"}]},
]


def with_held_out(target: Path, folder: Path, rows: list[Any], **overrides: Any) -> Recipe:
    """A recipe of two targets that answer the prompts first, with these held-out rows."""
    (folder / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "data__eval": [str(folder / "held-out.jsonl")],
        "data__eval_rows": 3,
        "data__regenerate": True,
        "data__regenerate_max_new_tokens": 4,
        "train__steps": 1,
        "topology__targets": [0, 1],
        "topology__drafters": [0],
    }
    return tiny_recipe(target, **settings | overrides)


def test_held_out_rows_that_cannot_be_used_end_the_job_before_anything_is_answered(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    recipe = with_held_out(tiny_target_folder, tmp_path, UNUSABLE)
    with started(tmp_path / "runs" / "a", recipe, rank=impatient_rank) as job:
        assert set(job.wait()) == {1}, job.output()
    assert "None of 5 held-out rows has a prompt" in job.output()
    assert "2 rows: input_ids outside the vocabulary" in job.output()
    assert "Traceback" not in job.output()
    assert not (tmp_path / "answers").exists()


def test_rows_that_cannot_be_answered_are_told_once_and_the_others_are_learned(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    usable = [{"messages": [{"role": "user", "content": f"How many, {number}?"}]} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*UNUSABLE, *usable]))
    train = {"data__train": [str(tmp_path / "rows.jsonl")], "data__eval": []}
    job = run(tmp_path / "runs" / "a", with_held_out(tiny_target_folder, tmp_path, [], **train))
    assert set(job.wait()) == {0}, job.output()
    assert job.output().count("regenerate: 1 skipped: tools or tool calls, which are not supported") == 1
    assert job.output().count(" skipped: ") == 4
    assert "regenerate: 8 answered" in job.output()


def test_held_out_rows_that_cannot_be_used_are_told_once_and_all_targets_decode_the_others(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    usable = [{"text": f"one two three {number}"} for number in range(5)]
    job = run(tmp_path / "runs" / "a", with_held_out(tiny_target_folder, tmp_path, [*UNUSABLE, *usable]))
    assert set(job.wait()) == {0}, job.output()
    assert job.output().count("data: 2 held-out rows skipped: input_ids outside the vocabulary") == 1
    assert job.output().count("held-out rows skipped") == 4
    assert job.lines("eval")[-1]["prompts"] == 3
