from __future__ import annotations

import json
from collections import Counter
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
