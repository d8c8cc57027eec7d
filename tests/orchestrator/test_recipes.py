"""Which recipe a run follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.container import Container
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.recipes import parse_overrides, recipe_of_run
from payload.recipe import load_recipe

RUN = "20261130-101010-abcdef"


def write_spec(container: Container, spec: object) -> None:
    folder = Path(container.settings.root) / "runs" / RUN
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text(json.dumps(spec))


def test_a_run_is_resumed_with_the_very_values_it_was_started_with(container: Container) -> None:
    recipe = load_recipe("tiny-cpu", {"train.steps": 3000, "optim.lr": 3e-3})
    write_spec(container, {"recipe": recipe.to_dict()})
    assert recipe_of_run(container, RUN) == recipe


@pytest.mark.parametrize("spec", [[], {}, {"recipe": {"train": {"stepz": 1}}}])
def test_a_spec_that_is_none_of_this_version_is_an_error_in_words(container: Container, spec: object) -> None:
    write_spec(container, spec)
    with pytest.raises(UsageError):
        recipe_of_run(container, RUN)


def test_a_run_that_is_not_there_is_named(container: Container) -> None:
    with pytest.raises(OrchestratorError, match="20261130-999999-abcdef"):
        recipe_of_run(container, "20261130-999999-abcdef")


@pytest.mark.parametrize(
    "text", ["2026-13-41", "!!int x", "!!float x", "!!timestamp x", "9" * 5000, "[" * 3000, "{a"]
)
def test_a_value_that_yaml_cannot_read_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="is not a YAML value"):
        parse_overrides([f"train.steps={text}"])
