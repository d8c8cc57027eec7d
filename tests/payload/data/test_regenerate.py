from __future__ import annotations

import copy
import json
import re
from collections import Counter
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, lists, tuples

from payload.data.answers import read_answers
from payload.data.generation import GenerationSettings, generate_answers
from payload.data.prepared import prepare
from payload.data.regenerate import Share, _documents, answer_share, prompt_keys, regenerate, skips
from payload.data.rows import Row
from payload.data.tokens import encode_row
from payload.decode import plain_decode
from payload.errors import PayloadError
from payload.target import Target

SETTINGS = GenerationSettings(batch_size=3, max_new_tokens=6, max_length=200)


@pytest.fixture(scope="module")
def target(words: Any) -> Target:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=None, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    return Target(Qwen3ForCausalLM(config).double())


def rows(*questions: str) -> list[Row]:
    return [Row({"messages": [{"role": "user", "content": question}]}, question) for question in questions]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_of_a_batch_are_those_of_each_prompt_alone(target: Target, words: Any) -> None:
    prompts = [[5, 6, 7], [9] * 11, [30, 40]]
    alone = [plain_decode(target, prompt, 6, eos_token_ids={2}) for prompt in prompts]
    assert generate_answers(target, prompts, {2}, SETTINGS) == alone


def test_ended_rows_are_no_longer_computed_and_the_others_answer_as_before(target: Target) -> None:
    """Ends that come at different times: tokens that the target says anyway."""
    prompts = [[5 + number, 6, 7 + number] for number in range(12)]
    longer = replace(SETTINGS, max_new_tokens=40)
    said = [plain_decode(target, prompt, 40) for prompt in prompts]
    ends = {2, *(text[3 * number] for number, text in enumerate(said[:9]))}
    watched, computed = copy.deepcopy(target), []
    watched.model.lm_head.register_forward_pre_hook(lambda head, hidden: computed.append(len(hidden[0])))
    answers = generate_answers(watched, prompts, ends, longer)
    assert answers == [plain_decode(target, prompt, 40, eos_token_ids=ends) for prompt in prompts]
    assert computed == sorted(computed, reverse=True)
    needed = sum(map(len, answers))
    looked_at_every = 8
    assert needed <= sum(computed) <= 1.15 * needed + len(prompts) * looked_at_every


def test_an_answer_leaves_off_where_a_row_of_training_data_is_full(target: Target) -> None:
    prompts = [[5] * 7, [6] * 3]
    short = replace(SETTINGS, max_length=8)
    answers = generate_answers(target, prompts, set(), short)
    assert answers == [plain_decode(target, [5] * 7, 1), plain_decode(target, [6] * 3, 5)]


def test_a_line_supervises_the_very_tokens_that_were_generated(
    target: Target, words: Any, tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl"
    regenerate(rows("How many?"), target, words, path, SETTINGS)
    (line,) = lines(path)
    example = encode_row(Row(line, "x"), words, 200, 1, Counter())
    answer = [token for token, kept in zip(example.input_ids, example.loss_mask, strict=True) if kept]
    prompt = example.input_ids[: -len(answer)]
    assert answer == plain_decode(target, prompt, 6, eos_token_ids={2})


def test_an_interrupted_run_goes_on_behind_its_last_whole_line(
    target: Target, words: Any, tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl"
    asked = rows("one", "two", "three", "four", "five")
    regenerate(asked, target, words, path, SETTINGS)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n") + 30])
    counts = regenerate(asked, target, words, path, SETTINGS)
    assert (counts["kept"], counts["answered"]) == (1, 4)
    assert {line["key"] for line in lines(path)} == {json.loads(line)["key"] for line in whole.splitlines()}


def test_a_prompt_is_answered_once_and_its_repetitions_are_counted(
    target: Target, words: Any, tmp_path: Path
) -> None:
    asked = rows("one", "two", "one", "one")
    counts = regenerate(asked, target, words, tmp_path / "answers.jsonl", SETTINGS)
    assert (counts["answered"], counts["skipped: it repeats an earlier prompt"]) == (2, 2)
    assert len(lines(tmp_path / "answers.jsonl")) == len(list(prompt_keys(asked))) == 2


def test_rows_without_a_question_are_counted_and_none_at_all_is_an_error(
    target: Target, words: Any, tmp_path: Path
) -> None:
    question = said("user", "two")
    contents: dict[str, Any] = {
        "no messages": {"text": "x"},
        "messages is not a list of turns": {"messages": None},
        "a turn whose content is not text": {"messages": [{"role": "user", "content": ["two"]}]},
        "no user turn": {"messages": [said("assistant", "x")]},
        "tools or tool calls, which are not supported": {
            "messages": [question],
            "tools": [{"name": "count"}],
        },
        "the tokenizer refuses it: .*": {"messages": [said("user", "\ud800")]},
    }
    useless = [Row(content, "here") for content in contents.values()]
    counts = regenerate([*rows("one"), *useless], target, words, tmp_path / "a", SETTINGS)
    assert counts["answered"] == 1
    for reason, line in zip(sorted(contents), skips(counts), strict=True):
        assert re.fullmatch(f"regenerate: 1 skipped: {reason}", line)
    with pytest.raises(PayloadError, match="No prompt could be answered"):
        regenerate(useless, target, words, tmp_path / "b", SETTINGS)


def test_a_damaged_file_is_not_taken_for_answers(target: Target, words: Any, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("garbage\n")
    with pytest.raises(PayloadError, match="damaged at byte 0"):
        regenerate(rows("one"), target, words, path, SETTINGS)


def conversation(*questions: str) -> Row:
    turns = [
        turn for text in questions for turn in (said("user", text), said("assistant", "Someone else's."))
    ]
    return Row({"messages": turns}, "here")


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def says(target: Target, words: Any, *answer: str) -> Target:
    """The target with another mind: it says these tokens one after the other, and ends."""
    spoken = [*map(words.convert_tokens_to_ids, answer), words.eos_token_id]
    changed = copy.deepcopy(target)
    read: list[torch.Tensor] = []

    def say(head: Any, arguments: Any, logits: torch.Tensor) -> torch.Tensor:
        newest = read[-1][:, -logits.shape[1] :]
        chosen = torch.full_like(newest, spoken[0])
        for before, after in pairwise(spoken):
            chosen[newest == before] = after
        return torch.nn.functional.one_hot(chosen, logits.shape[2]).to(logits.dtype)

    changed.model.model.embed_tokens.register_forward_pre_hook(lambda module, ids: read.append(ids[0]))
    changed.model.lm_head.register_forward_hook(say)
    return changed


def test_each_turn_of_a_conversation_is_answered_in_the_context_of_the_targets_own_answers(
    target: Target, words: Any, tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl"
    own = says(target, words, "e")
    regenerate([conversation("How many?", "And then?")], own, words, path, SETTINGS)
    (line,) = lines(path)
    assert [turn["role"] for turn in line["conversation"]] == ["user", "assistant", "user", "assistant"]
    whole = words.decode(line["input_ids"])
    assert "Someone else" not in whole
    assert whole.index("How many?") < whole.index("assistant\ne<|im_end|>") < whole.index("And then?")
    assert len(spans(line)) == 2
    for start, end in spans(line):
        ids = line["input_ids"]
        assert ids[start:end] == plain_decode(own, ids[:start], 6, eos_token_ids={2})


def test_what_the_answers_of_before_were_thought_out_with_does_not_matter_when_they_are_replaced(
    target: Target, words: Any, tmp_path: Path
) -> None:
    plain, thought = conversation("How many?", "And then?"), conversation("How many?", "And then?")
    assert thought.content is not None
    thought.content["messages"][1]["reasoning_content"] = "Let me count."
    for name, row in (("a", plain), ("b", thought)):
        regenerate([row], target, words, tmp_path / name, SETTINGS)
    assert lines(tmp_path / "a") == lines(tmp_path / "b")


def test_an_answer_that_its_text_does_not_give_back_is_learned_where_it_was_generated(
    target: Target, words: Any, tmp_path: Path
) -> None:
    """``h`` and ``e`` one by one are another token, ``he``, in the next prompt."""
    path = tmp_path / "answers.jsonl"
    own = says(target, words, "h", "e")
    regenerate([conversation("How many?", "And then?")], own, words, path, SETTINGS)
    (line,) = lines(path)
    [earlier] = line["earlier"]
    for row in (earlier, line):
        [(start, end)] = spans(row)
        assert row["input_ids"][start:end] == [*words.convert_tokens_to_ids(["h", "e"]), words.eos_token_id]
        assert end == len(row["input_ids"])
    assert "And then?" in words.decode(line["input_ids"])
    assert "And then?" not in words.decode(earlier["input_ids"])


TAKES_OUT_THE_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('h')[-1] if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""All up to an ``h``, which stands for the end of thinking here, is gone from what is rendered of an earlier answer."""


def three_turns(words: Any, template: str | None) -> tuple[list[Row], Any]:
    """Two conversations of three questions, and the tokenizer with that template, or its own."""
    changed = copy.deepcopy(words)
    changed.chat_template = template or words.chat_template
    return [conversation("How many?", "And then?", f"And {number}?") for number in range(2)], changed


def learned(path: Path, asked: list[Row]) -> list[tuple[list[int], list[int]]]:
    """What comes before each supervised answer, and the answer, as they are read to be learned."""
    rows = [row.content for row in read_answers(path, prompt_keys(asked))]
    return [
        (row["input_ids"][:start], row["input_ids"][start:end])
        for row in rows
        if row
        for start, end in spans(row)
    ]


@pytest.mark.parametrize(("template", "rows_each"), [(TAKES_OUT_THE_THINKING, 3), (None, 1)])
def test_every_answer_is_learned_once_in_the_context_in_which_it_was_generated(
    target: Target, words: Any, tmp_path: Path, template: str | None, rows_each: int
) -> None:
    asked, tokenizer = three_turns(words, template)
    path = tmp_path / "answers.jsonl"
    given: list[tuple[list[int], list[int]]] = []

    def watched(target: Target, prompts: list[list[int]], *rest: Any) -> list[list[int]]:
        answers = generate_answers(target, prompts, *rest)
        given.extend(zip(prompts, answers, strict=True))
        return answers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("payload.data.regenerate.generate_answers", watched)
        regenerate(asked, says(target, words, "o", "h", "e" if template else "o"), tokenizer, path, SETTINGS)
    assert len(given) == 6
    assert sorted(learned(path, asked)) == sorted(given)
    assert all(len(line.get("earlier", [])) + 1 == rows_each for line in lines(path))
    packed = tmp_path / "packed.safetensors"
    made = prepare(read_answers(path, prompt_keys(asked)), tokenizer, 200, 1, packed)
    assert made.documents == 2 * rows_each
    assert made.loss_tokens == sum(len(answer) for _, answer in given)


def test_a_line_that_was_cut_off_between_its_rows_is_answered_again(
    target: Target, words: Any, tmp_path: Path
) -> None:
    asked, tokenizer = three_turns(words, TAKES_OUT_THE_THINKING)
    path, own = tmp_path / "answers.jsonl", says(target, words, "o", "h", "e")
    regenerate(asked, own, tokenizer, path, SETTINGS)
    whole, expected = path.read_bytes(), learned(path, asked)
    first, second = whole.splitlines(keepends=True)
    for end in range(0, len(second), 97):
        path.write_bytes(first + second[:end])
        counts = regenerate(asked, own, tokenizer, path, SETTINGS)
        assert (counts["kept"], counts["answered"]) == (1, 1)
        assert path.read_bytes() == whole
        assert learned(path, asked) == expected


TOKENS = lists(integers(0, 1), min_size=1, max_size=3)


@given(lists(tuples(booleans(), TOKENS, TOKENS), min_size=1, max_size=5))
@settings(deadline=None)
def test_rows_are_as_few_as_can_hold_every_answer_whatever_is_rendered_of_the_earlier_ones(
    turns: list[tuple[bool, list[int], list[int]]],
) -> None:
    """Of each turn: whether its prompt begins with all that was said, what else is in it, and the answer."""
    spoken: list[tuple[list[int], list[int]]] = []
    for goes_on, more, answer in turns:
        said = [*spoken[-1][0], *spoken[-1][1]] if goes_on and spoken else []
        spoken.append((said + more, answer))
    documents = _documents(spoken)
    whole = [prompt + answer for prompt, answer in spoken]
    of_their_own = [
        ids
        for number, ids in enumerate(whole)
        if not any(later[: len(ids)] == ids for later in whole[number + 1 :])
    ]
    assert [document["input_ids"] for document in documents] == of_their_own
    holders = []
    for prompt, answer in spoken:
        start, end = len(prompt), len(prompt) + len(answer)
        holders.append([row for row in documents if row["input_ids"][:end] == prompt + answer][-1])
        assert all(holders[-1]["loss_mask"][start:end])
    for document in documents:
        expected = [False] * len(document["input_ids"])
        for holder, (prompt, answer) in zip(holders, spoken, strict=True):
            if holder is document:
                expected[len(prompt) : len(prompt) + len(answer)] = [True] * len(answer)
        assert document["loss_mask"] == expected


def spans(line: dict[str, Any]) -> list[tuple[int, int]]:
    """Where the supervised runs begin and end."""
    mask = [False, *line["loss_mask"], False]
    edges = [index for index in range(len(mask) - 1) if mask[index] != mask[index + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_sampled_answers_repeat_with_their_seed(target: Target, words: Any) -> None:
    prompts = [[5, 6, 7], [9] * 11]

    def answers(seed: int) -> list[list[int]]:
        return generate_answers(target, prompts, {2}, replace(SETTINGS, temperature=1.0, seed=seed))

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)


def test_a_stop_takes_effect_within_eight_tokens_and_keeps_the_answers_so_far(
    target: Target, words: Any, tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl"
    tokens: list[int] = []
    counting = copy.deepcopy(target)
    counting.model.lm_head.register_forward_pre_hook(lambda head, arguments: tokens.append(1))
    asked = rows("one", "two", "three", "four", "five")
    patient = replace(SETTINGS, max_new_tokens=50)
    with pytest.raises(PayloadError, match="those so far are kept"):
        regenerate(asked, counting, words, path, SETTINGS, should_stop=lambda: len(tokens) > 8)
    assert 6 < len(tokens) <= 12, "six tokens of the first three answers, and six of the others at most"
    assert len(lines(path)) == 3
    tokens.clear()
    with pytest.raises(PayloadError, match="Told to stop"):
        regenerate(asked, counting, words, path, patient, should_stop=lambda: True)
    assert len(tokens) == 8


class Claims(Share):
    """A share of work that others share too; ``stop_after`` batches it gives up."""

    def __init__(self, part: int, numbers: Any, stop_after: int = 1000) -> None:
        super().__init__()
        self.part = part
        self._numbers = numbers
        self.left = stop_after

    def claim(self) -> int:
        self.left -= 1
        return next(self._numbers)


MANY = rows(*(f"question {number}" for number in range(11)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_who_gives_them_nor_on_what_was_cut_short(
    target: Target, words: Any, tmp_path: Path, temperature: float
) -> None:
    settings = replace(SETTINGS, temperature=temperature)
    alone = tmp_path / "alone.jsonl"
    regenerate(MANY, target, words, alone, settings)
    expected = [row.content for row in read_answers(alone, prompt_keys(MANY))]
    assert [row["key"] for row in lines(alone)] == [row["key"] for row in expected if row], "in their order"

    shared = tmp_path / "shared.jsonl"
    numbers = count()
    for part in (2, 0):
        share = Claims(part, numbers, stop_after=2)
        with pytest.raises(PayloadError, match="Told to stop"):
            answer_share(
                MANY, target, words, shared, settings, share, should_stop=lambda share=share: share.left < 1
            )
    second = tmp_path / "shared.2.jsonl"
    second.write_bytes(second.read_bytes()[:-20])
    assert len(lines(shared)) == 3
    numbers = count()
    total: Counter[str] = Counter()
    for part in (1, 0):
        total += answer_share(MANY, target, words, shared, settings, Claims(part, numbers))
    assert [row.content for row in read_answers(shared, prompt_keys(MANY))] == expected
    assert (total["kept"], total["answered"]) == (5, 6)
    nothing_to_do = regenerate(MANY, target, words, shared, settings)
    assert (nothing_to_do["kept"], nothing_to_do["answered"]) == (11, 0)


def test_a_prompt_that_can_never_be_answered_does_not_have_its_batch_answered_again(
    target: Target, words: Any, tmp_path: Path
) -> None:
    asked = [*MANY[:2], *rows("long " * 300)]
    first = regenerate(asked, target, words, tmp_path / "a.jsonl", SETTINGS)
    again = regenerate(asked, target, words, tmp_path / "a.jsonl", SETTINGS, should_stop=lambda: True)
    too_long = "skipped: prompt longer than the maximum length"
    assert (first["answered"], again["answered"], again["kept"]) == (2, 0, 2)
    assert first[too_long] == again[too_long] == 1


def test_answers_that_cannot_be_written_are_an_error_with_the_files_name(
    target: Target, words: Any, tmp_path: Path
) -> None:
    (tmp_path / "answers.1.jsonl").symlink_to(tmp_path / "no" / "such" / "folder")
    share = Claims(1, count())
    with pytest.raises(PayloadError, match=r"cannot be written to .*answers\.1\.jsonl: No such file"):
        answer_share(MANY, target, words, tmp_path / "answers.jsonl", SETTINGS, share)
