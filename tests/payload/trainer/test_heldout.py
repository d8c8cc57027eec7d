"""Held-out prompts, and summaries of several evaluations as one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from payload.acceptance import Acceptance, combine, evaluate
from payload.errors import PayloadError
from payload.trainer.heldout import HeldOut, held_out_prompts, measure
from tests.payload.test_decode import _drafter
from tests.payload.tiny_targets import tiny_target
from tests.payload.trainer.jobs import tiny_recipe, tiny_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "Seven."},
    {"role": "user", "content": "And then?"},
]


@pytest.fixture(scope="module")
def words() -> Any:
    return tiny_tokenizer()


def held_out(tmp_path: Path, words: Any, rows: list[Any], **changes: Any) -> HeldOut:
    path = tmp_path / "held-out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tiny_recipe(tmp_path, data__eval=[str(path)], **changes)
    return held_out_prompts(recipe, words, SimpleNamespace(eos_token_id=[7, 8]))


def test_a_prompt_is_what_comes_before_the_first_answer_or_the_first_half(tmp_path: Path, words: Any) -> None:
    ids = list(range(5, 15))
    found = held_out(tmp_path, words, [{"messages": CHAT}, {"input_ids": ids}, {"text": "one two three"}])
    chat, half, text = found.prompts
    shown = words.decode(list(chat))
    assert shown.endswith("How many?<|im_end|>\n<|im_start|>assistant\n")
    assert "Seven" not in shown
    assert half == tuple(ids[:5])
    whole = words("one two three")["input_ids"]
    assert text == tuple(whole[: len(whole) // 2])


def test_an_answer_ends_with_any_token_that_tokenizer_or_target_name(tmp_path: Path, words: Any) -> None:
    assert held_out(tmp_path, words, [{"messages": CHAT}]).eos_token_ids == {words.eos_token_id, 7, 8}


def test_only_so_many_prompts_are_taken_and_none_that_leaves_no_room(tmp_path: Path, words: Any) -> None:
    rows = [{"input_ids": [5] * 400}, *({"input_ids": [5] * (2 + row)} for row in range(6))]
    found = held_out(tmp_path, words, rows, data__eval_rows=4)
    assert [len(prompt) for prompt in found.prompts] == [1, 1, 2], (
        "the first row is too long to be one of four"
    )


@pytest.mark.parametrize("row", [{"messages": [CHAT[2]]}, {"x": 1}, {"input_ids": ["a", "b"]}])
def test_no_usable_prompt_is_an_error(tmp_path: Path, words: Any, row: Any) -> None:
    with pytest.raises(PayloadError, match="None of the held-out rows"):
        held_out(tmp_path, words, [row])


def test_parts_of_an_evaluation_add_up_to_the_whole() -> None:
    target = tiny_target(vocab_size=8)
    drafter = _drafter(target)
    prompts = [[token] * length for length in range(1, 7) for token in range(1, 4)]
    whole = evaluate(target, drafter, prompts, 9, compare_plain=False)
    told: list[tuple[int, int]] = []
    measured = measure(
        target,
        drafter,
        HeldOut(tuple(map(tuple, prompts)), frozenset()),
        9,
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert measured is not None
    assert told == [(0, 18), (16, 18)]
    assert replace(measured, seconds=0.0) == replace(whole, seconds=0.0)
    assert measured.mean_accepted_length == whole.mean_accepted_length
    assert measured.by_position == whole.by_position


def test_ratios_are_of_sums_and_not_means_of_ratios() -> None:
    few = Acceptance(1, 10, 2, 8, (2, 1), (2, 2), 1.0, plain_tokens=10, plain_seconds=4.0, identical=1)
    many = Acceptance(3, 90, 18, 36, (9, 0), (18, 6), 4.0, plain_tokens=90, plain_seconds=16.0, identical=2)
    both = combine([few, many])
    assert both.mean_accepted_length == 44 / 20
    assert both.by_position == (11 / 20, 1 / 8)
    assert both.speedup == 4.0
    assert both.identical == 3
    assert combine([few, replace(many, plain_tokens=None, plain_seconds=None)]).speedup is None


def test_an_evaluation_that_was_told_to_stop_measures_nothing() -> None:
    target = tiny_target(vocab_size=8)
    prompts = HeldOut(((1,), (2,)), frozenset())
    assert measure(target, _drafter(target), prompts, 5, should_stop=lambda: True) is None
