"""The paper estimate for eight GPUs: its formula, and that its figures can be replaced."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import eight_gpus
from payload.estimate import drafter_config
from payload.recipe import load_recipe
from payload.target_shape import shape_of
from payload.trainer.metrics import drafter_step_flops

RECIPE = load_recipe("qwen3-8b")
FIGURES, SOURCES = eight_gpus.read_figures()
RECIPES_SCENARIO, _, WHOLE_ROWS = eight_gpus.SCENARIOS


def test_flop_are_those_that_training_reports() -> None:
    config = drafter_config(RECIPE, shape_of("Qwen/Qwen3-8B"))
    assert eight_gpus.drafter_flop(RECIPE, 4, 3072, 512) == drafter_step_flops(RECIPE, config)


def test_at_a_measured_shape_a_lone_drafter_takes_the_measured_time() -> None:
    [split] = [s for s in eight_gpus.splits(FIGURES, WHOLE_ROWS, 8, RECIPE) if s.drafters == 1]
    assert split.step_ms == pytest.approx(FIGURES.drafter_ms_4x3072x512)
    assert split.drafter_busy == pytest.approx(1)


def test_every_split_is_there_and_the_slower_side_sets_the_pace() -> None:
    found = eight_gpus.splits(FIGURES, RECIPES_SCENARIO, 8, RECIPE)
    assert [(s.targets, s.drafters) for s in found] == [*((t, 8 - t) for t in range(1, 8)), (8, 8)]
    for split in found[:-1]:
        assert max(split.target_busy, split.drafter_busy) == pytest.approx(1)
        assert {"targets": split.target_busy, "drafters": split.drafter_busy}[split.bound] == pytest.approx(1)
    assert found[-1].target_busy + found[-1].drafter_busy == pytest.approx(1)


def test_a_slow_link_sets_the_pace_by_the_bytes_of_a_micro_batch() -> None:
    slow = replace(FIGURES, link_bytes_per_s=1e8)
    split = eight_gpus.splits(slow, RECIPES_SCENARIO, 2, RECIPE)[0]
    assert split.bound == "link"
    assert split.step_ms == pytest.approx(1000 * eight_gpus.message_bytes(RECIPE) / 1e8)


def test_figures_name_their_source_and_others_replace_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(source.startswith(("measured", "estimated")) for source in SOURCES.values())
    other = tmp_path / "figures.json"
    other.write_text(json.dumps({"target_tokens_per_s_550": {"value": 1000, "source": "measured: slowly"}}))
    eight_gpus.main(["--figures", str(other), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["figures"]["target_tokens_per_s_550"] == 1000
    assert found["sources"]["target_tokens_per_s_550"] == "measured: slowly"
    assert found["figures"]["drafter_ms_4x3072x512"] == FIGURES.drafter_ms_4x3072x512
    eight_gpus.main([])
    assert "| 5 + 3 |" in capsys.readouterr().out


def test_the_page_shows_what_the_script_prints() -> None:
    page = eight_gpus.FIGURES_FILE.with_name("eight-gpus.md").read_text("utf-8")
    assert eight_gpus.describe(FIGURES, SOURCES, 8, RECIPE) in page
