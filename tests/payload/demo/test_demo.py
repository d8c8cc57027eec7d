from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from payload.data.tokens import verify_template
from payload.demo import corpus, tokenizer
from payload.demo.target import demo_config, ensure_demo_target, target_name
from payload.errors import PayloadError
from payload.recipe import TargetSpec
from payload.target import Target
from payload.trainer.program import DEMO_MASK_TOKEN

STEPS = 3


def prompts(split: corpus.Split, count: int, seed: int) -> list[str]:
    return [row["messages"][0]["content"] for row in corpus.rows(split, count, seed)]


def test_rows_depend_on_the_seed_alone() -> None:
    assert list(corpus.rows("train", 50, 1)) == list(corpus.rows("train", 50, 1))
    assert list(corpus.rows("train", 50, 1)) != list(corpus.rows("train", 50, 2))


def test_no_held_out_prompt_is_ever_a_training_prompt() -> None:
    held_out = prompts("eval", 300, 0) + prompts("eval", 300, 1)
    assert len(set(held_out[:300])) == 300
    assert not set(held_out) & set(prompts("train", 5000, 0))


def test_arithmetic_in_the_text_is_right() -> None:
    sums = [
        row["messages"][1]["content"]
        for row in corpus.rows("train", 500)
        if " plus " in row["messages"][1]["content"]
    ]
    assert sums
    for text in sums:
        words = text.replace(",", "").split()
        at = words.index("plus")
        assert int(words[at - 1]) + int(words[at + 1]) == int(words[at + 3])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


def test_the_target_is_trained_once_and_found_again(root: Path) -> None:
    said: list[str] = []
    folder = ensure_demo_target(root, said.append, steps=STEPS)
    assert folder == root / "targets" / target_name(STEPS)
    assert any("training" in line for line in said)
    said.clear()
    assert ensure_demo_target(root, said.append, steps=STEPS) == folder
    assert said == [f"target: using {folder}"]


def test_transformers_loads_it_with_its_tokenizer_template_and_mask_row(root: Path) -> None:
    folder = ensure_demo_target(root, lambda line: None, steps=STEPS)
    words = AutoTokenizer.from_pretrained(folder)
    target = Target.load(TargetSpec(str(folder), dtype="float32"))
    assert len(words) == tokenizer.VOCABULARY == target.embedding_weight.shape[0]
    assert words.mask_token_id == DEMO_MASK_TOKEN
    assert words.eos_token_id == target.config.eos_token_id == demo_config().eos_token_id
    verify_template(words)


def test_a_damaged_target_is_built_anew(root: Path) -> None:
    folder = ensure_demo_target(root, lambda line: None, steps=STEPS)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    said: list[str] = []
    ensure_demo_target(root, said.append, steps=STEPS)
    assert "building it anew" in said[0]
    assert weights.read_bytes() == content


def test_a_stop_while_training_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match="Told to stop"):
        ensure_demo_target(tmp_path, lambda line: None, lambda: True, steps=STEPS)
    assert list((tmp_path / "targets").iterdir()) == []
