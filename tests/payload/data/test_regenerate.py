from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from payload.data.regenerate import GenerationSettings, generate_answers, regenerate
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
    assert generate_answers(target.model, prompts, words, SETTINGS) == alone


def test_a_line_supervises_the_very_tokens_that_were_generated(
    target: Target, words: Any, tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl"
    regenerate(rows("How many?"), target.model, words, path, SETTINGS)
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
    regenerate(asked, target.model, words, path, SETTINGS)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n") + 30])
    counts = regenerate(asked, target.model, words, path, SETTINGS)
    assert (counts["kept"], counts["answered"]) == (1, 4)
    assert {line["key"] for line in lines(path)} == {json.loads(line)["key"] for line in whole.splitlines()}


def test_rows_without_a_question_are_counted_and_none_at_all_is_an_error(
    target: Target, words: Any, tmp_path: Path
) -> None:
    useless = [Row({"text": "x"}, "a"), Row({"messages": [{"role": "assistant", "content": "x"}]}, "b")]
    counts = regenerate([*rows("one"), *useless], target.model, words, tmp_path / "a", SETTINGS)
    assert counts["skipped: no messages"] == counts["skipped: no user turn"] == 1
    with pytest.raises(PayloadError, match="No prompt could be answered"):
        regenerate(useless, target.model, words, tmp_path / "b", SETTINGS)


def test_a_damaged_file_is_not_taken_for_answers(target: Target, words: Any, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("garbage\n")
    with pytest.raises(PayloadError, match="damaged at byte 0"):
        regenerate(rows("one"), target.model, words, path, SETTINGS)


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
    regenerate([conversation("How many?", "And then?")], own.model, words, path, SETTINGS)
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
    regenerate(
        [conversation("How many?", "And then?")], says(target, words, "h", "e").model, words, path, SETTINGS
    )
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
        return generate_answers(target.model, prompts, words, replace(SETTINGS, temperature=1.0, seed=seed))

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)


def test_a_stop_takes_effect_at_the_next_token_and_keeps_the_answers_so_far(
    target: Target, words: Any, tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl"
    tokens: list[int] = []
    counting = copy.deepcopy(target.model)
    counting.lm_head.register_forward_pre_hook(lambda head, arguments: tokens.append(1))
    asked = rows("one", "two", "three", "four", "five")
    patient = replace(SETTINGS, max_new_tokens=200)
    with pytest.raises(PayloadError, match="those so far are kept"):
        regenerate(asked, counting, words, path, SETTINGS, should_stop=lambda: len(tokens) > 8)
    assert len(tokens) == 9, "six tokens of the first three answers, and three more"
    assert len(lines(path)) == 3
    tokens.clear()
    with pytest.raises(PayloadError, match="Told to stop"):
        regenerate(asked, counting, words, path, patient, should_stop=lambda: True)
    assert len(tokens) == 1
