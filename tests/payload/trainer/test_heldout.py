"""Held-out prompts, and summaries of several evaluations as one."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import DataObject, data, integers, lists, sampled_from

from payload.acceptance import Acceptance, combine, evaluate
from payload.data.rows import DEMO_ROWS, Row
from payload.errors import PayloadError, ToldToStopError
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


def held_out(tmp_path: Path, words: Any, rows: list[Any], told: Any = print, **changes: Any) -> HeldOut:
    path = tmp_path / "held-out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tiny_recipe(tmp_path, data__eval=[str(path)], **changes)
    return held_out_prompts(recipe, words, SimpleNamespace(eos_token_id=[7, 8]), told)


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
    assert [len(prompt) for prompt in found.prompts] == [1, 1, 2, 2]


UNUSABLE: dict[str, Any] = {
    "not a JSON object": [1],
    "no messages, text or input_ids": {"x": 1},
    "messages is not a list of turns": {"messages": "How many?"},
    "a turn without a role": {"messages": [{"content": "How many?"}]},
    "a turn whose content is not text": {"messages": [{"role": "user", "content": None}]},
    "tools or tool calls, which are not supported": {"messages": CHAT, "tools": [{"name": "count"}]},
    "no turn before the first answer": {"messages": [CHAT[2]]},
    "the tokenizer refuses it: .*": {"messages": [{"role": "user", "content": "\ud800"}]},
    "text is empty or not text": {"text": ["How many?"]},
    "input_ids outside the vocabulary": {"input_ids": [5, 10**6]},
    "loss_mask of another length than input_ids": {"input_ids": [5, 6], "loss_mask": [1]},
    "too short for a prompt": {"input_ids": [5]},
    "prompt longer than the maximum length": {"input_ids": [5] * 400},
}


@given(data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_the_first_usable_rows_are_taken_whatever_lies_between_them_and_none_after_them_is_read(
    tmp_path: Path, words: Any, data: DataObject
) -> None:
    """A usable row is told by its length, an unusable one counted by its reason."""
    rows: list[Any] = data.draw(lists(sampled_from([*UNUSABLE, *range(2, 12)]), max_size=12))
    wanted = data.draw(integers(1, 5))
    usable = [row for row in rows if isinstance(row, int)]
    last = [number for number, row in enumerate(rows) if isinstance(row, int)][:wanted][-1:] or [
        len(rows) - 1
    ]
    read = rows if len(usable) < wanted else rows[: last[0] + 1]
    told: list[str] = []
    written = [{"input_ids": [5] * row} if isinstance(row, int) else UNUSABLE[row] for row in rows]
    reasons = Counter(row for row in read if not isinstance(row, int))
    if not usable:
        with pytest.raises(PayloadError, match=f"None of {len(rows)} held-out rows has a prompt") as caught:
            held_out(tmp_path, words, written, told.append, data__eval_rows=wanted)
        assert all(
            re.search(f"{times} rows: {reason}", caught.value.hint) for reason, times in reasons.items()
        )
        return
    found = held_out(tmp_path, words, written, told.append, data__eval_rows=wanted)
    assert [len(prompt) for prompt in found.prompts] == [length // 2 for length in usable[:wanted]]
    assert len(told) == len(reasons)
    for reason, times in reasons.items():
        line = re.compile(f"data: {times} held-out rows skipped: {reason}")
        assert sum(line.fullmatch(one) is not None for one in told) == 1


def test_reading_stops_when_there_are_enough_and_when_told_to(
    tmp_path: Path, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def endless(*arguments: Any) -> Iterator[Row]:
        for number in count():
            read.append(number)
            yield Row({"messages": CHAT} if number % 3 == 0 else None, "here")

    monkeypatch.setattr("payload.trainer.heldout.read_rows", endless)
    recipe = tiny_recipe(tmp_path, data__eval=["endless"], data__eval_rows=4)
    assert len(held_out_prompts(recipe, words, None).prompts) == 4
    assert len(read) == 10
    with pytest.raises(ToldToStopError):
        held_out_prompts(recipe, words, None, should_stop=lambda: len(read) > 15)


def test_the_demo_has_as_many_held_out_rows_as_are_asked_for(tmp_path: Path, words: Any) -> None:
    recipe = tiny_recipe(tmp_path, data__eval=["demo"], data__eval_rows=DEMO_ROWS + 1)
    assert len(held_out_prompts(recipe, words, None).prompts) == DEMO_ROWS + 1


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
