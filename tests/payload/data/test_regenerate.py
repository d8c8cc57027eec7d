from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from payload.data.answers import read_answers
from payload.data.generation import GenerationSettings, generate_answers
from payload.data.regenerate import Share, answer_share, prompt_keys, regenerate
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


def test_rows_without_a_question_are_counted_and_none_at_all_is_an_error(
    target: Target, words: Any, tmp_path: Path
) -> None:
    useless = [Row({"text": "x"}, "a"), Row({"messages": [{"role": "assistant", "content": "x"}]}, "b")]
    counts = regenerate([*rows("one"), *useless], target, words, tmp_path / "a", SETTINGS)
    assert counts["skipped: no messages"] == counts["skipped: no user turn"] == 1
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


def test_an_answer_that_its_text_does_not_give_back_is_context_but_not_supervised(
    target: Target, words: Any, tmp_path: Path
) -> None:
    """``h`` and ``e`` one by one are another token, ``he``, in the next prompt."""
    path = tmp_path / "answers.jsonl"
    regenerate([conversation("How many?", "And then?")], says(target, words, "h", "e"), words, path, SETTINGS)
    (line,) = lines(path)
    [(start, end)] = spans(line)
    assert line["input_ids"][start:end] == [*words.convert_tokens_to_ids(["h", "e"]), words.eos_token_id]
    assert end == len(line["input_ids"])


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
