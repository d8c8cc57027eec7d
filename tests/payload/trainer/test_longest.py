"""The longest prompts, found where the data are, and the estimate that counts with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from payload.data.regenerate import regenerate
from payload.data.rows import read_jsonl
from payload.data.tokens import load_tokenizer
from payload.estimate import answer
from payload.recipe import Recipe
from payload.target import Target
from payload.trainer.answering import generation_settings
from payload.trainer.longest import longest_prompts
from tests.payload.trainer.jobs import tiny_recipe
from tests.payload.trainer.test_evaluate import ask, asked


def said(role: str, words: int) -> dict[str, str]:
    return {"role": role, "content": "how many days " * words}


@pytest.fixture
def recipe(tiny_target_folder: Path, tmp_path: Path) -> Recipe:
    rows: list[Any] = [{"messages": [said("user", 1 + number)]} for number in range(90)]
    rows += [{"messages": [said("user", 20), said("assistant", 30), said("user", 5), said("assistant", 900)]}]
    rows += [{"text": "no question " * 900}, {"messages": [said("assistant", 900)]}, {"messages": "none"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data__train": [str(tmp_path / "rows.jsonl")], "data__eval": ["demo"], "data__eval_rows": 4}
    return tiny_recipe(
        tiny_target_folder, data__regenerate=True, data__regenerate_batch=128, data__max_length=256, **data
    )


def test_the_longest_prompt_is_the_longest_that_the_target_is_given(recipe: Recipe, tmp_path: Path) -> None:
    target, tokenizer = Target.load(recipe.target), load_tokenizer(recipe.target)
    given: list[int] = []

    class Watched(Target):
        def step_rows(self, input_ids: Any, *rest: Any, **options: Any) -> Any:
            given.append(input_ids.shape[1])
            return super().step_rows(input_ids, *rest, **options)

    watched = Watched(target.model)
    rows = read_jsonl(Path(recipe.data.train[0]))
    regenerate(rows, watched, tokenizer, tmp_path / "answers.jsonl", generation_settings(recipe))
    found = longest_prompts(recipe)
    assert found.train == max(given)
    assert found.held_out is not None
    assert 5 < found.held_out < 256


def test_rows_that_are_never_answered_have_no_longest_prompt(recipe: Recipe) -> None:
    contents: list[Any] = [None, 5, ["how many days"], {"text": "how many days"}]
    rows: list[Any] = [{"messages": [{"role": "user", "content": content}]} for content in contents]
    rows += [{"messages": [said("user", 3)], "tools": [{"name": "count"}]}]
    Path(recipe.data.train[0]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert longest_prompts(recipe).train is None


def test_a_container_counts_with_the_prompts_that_it_has(recipe: Recipe, tmp_path: Path) -> None:
    result, _ = asked(tmp_path, answer, recipe=recipe.to_dict())
    [both] = result["estimates"]
    assert both["phase"] == "answering prompts"
    assert f"prompts of {longest_prompts(recipe).train} tokens" in " ".join(both["terms"])
    Path(recipe.data.train[0]).unlink()
    status, final, events = ask(tmp_path, "payload.estimate", recipe=recipe.to_dict())
    assert status == 0, final
    assert any("lengths are assumed" in event.get("message", "") for event in events)
