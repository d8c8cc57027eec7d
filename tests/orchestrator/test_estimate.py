"""What `estimate` shows, and what it says when it cannot know."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.errors import UsageError
from orchestrator.estimate import estimate
from payload.recipe import load_recipe


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "estimate", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_each_role_of_a_recipe_is_shown_with_its_terms_and_the_cards_that_hold_it() -> None:
    done = run("--recipe", "qwen3-8b")
    assert done.returncode == 0, done.stderr
    assert "qwen3-8b: target (rank 0, 1, 2, 3, 4)" in done.stdout
    assert "qwen3-8b: drafter (rank 5, 6, 7)" in done.stdout
    assert "AdamW's moments, fp32" in done.stdout
    assert done.stdout.count("GPUs that hold it") == 2


def test_the_phase_with_the_peak_is_named_and_the_others_are_beside_it() -> None:
    done = run("--recipe", "smollm2")
    assert done.returncode == 0, done.stderr
    for said in ("the peak, answering prompts", "for comparison: a training step", "prompts of 256 tokens"):
        assert said in done.stdout


def test_overrides_change_the_estimate_and_json_is_one_value() -> None:
    options = ("--set", "topology.targets=[0]", "--set", "topology.drafters=[0]", "--json")
    found = json.loads(run("--recipe", "qwen3-8b", *options).stdout)
    assert [one["role"] for one in found["estimates"]] == ["both"]
    smaller = json.loads(run("--recipe", "qwen3-8b", *options, "--set", "train.batch_size=1").stdout)
    assert smaller["estimates"][0]["allocated_bytes"] < found["estimates"][0]["allocated_bytes"]


def test_without_a_recipe_or_a_known_target_it_says_what_to_give() -> None:
    assert run().returncode == 2
    done = run("--recipe", "smollm2", "--set", "target.gguf_file=another.gguf")
    assert done.returncode == 2
    assert "--config" in done.stderr


def test_a_config_file_of_the_desk_will_do(tmp_path: Path) -> None:
    config = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    [both] = estimate(load_recipe("smollm2"), tmp_path)
    assert both["role"] == "both"
    assert both["cards"] == [24, 48, 80, 141]
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 576}))
    with pytest.raises(UsageError, match="num_attention_heads is missing"):
        estimate(load_recipe("smollm2"), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        estimate(load_recipe("smollm2"), tmp_path)
