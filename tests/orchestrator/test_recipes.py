"""Which recipe a run follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.container import Container
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.recipes import (
    make_arguments,
    parse_overrides,
    recipe_of_run,
    recipe_to_resume,
    refuse_unread_by_evaluation,
)
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


def test_a_resume_may_change_how_its_own_recipe_is_watched(container: Container) -> None:
    own = load_recipe("tiny-cpu", {"train.steps": 3000, "name": "mine"})
    write_spec(container, {"recipe": own.to_dict()})
    resumed = recipe_to_resume(container, RUN, None, ["train.log_every=5"])
    assert (resumed.name, resumed.train.steps, resumed.train.log_every) == ("mine", 3000, 5)
    assert resumed.digest() == own.digest()


@pytest.mark.parametrize(
    ("name", "overrides", "changed"),
    [
        (None, ["train.steps=4000", "train.log_every=1"], ["train.steps"]),
        (None, ["optim={lr: 1, clip: 2}"], ["optim.lr", "optim.clip"]),
        ("tiny-cpu", ["train.log_every=5"], ["train.steps"]),
    ],
)
def test_a_resume_that_would_compute_something_else_is_refused_with_what_to_do(
    container: Container, name: str | None, overrides: list[str], changed: list[str]
) -> None:
    write_spec(container, {"recipe": load_recipe("tiny-cpu", {"train.steps": 3000}).to_dict()})
    with pytest.raises(UsageError) as raised:
        recipe_to_resume(container, RUN, name, overrides)
    assert all(key in raised.value.message for key in changed)
    assert "log_every" not in raised.value.message
    assert f"train.from_pretrained=runs/{RUN}" in raised.value.hint
    assert "HOST=local CT=200" in raised.value.hint


def test_a_run_of_another_version_is_resumed_with_a_recipe_that_is_named(container: Container) -> None:
    write_spec(container, {"recipe": {"train": {"stepz": 1}}})
    assert recipe_to_resume(container, RUN, "tiny-cpu", []).name == "tiny-cpu"


def test_what_an_evaluation_does_not_read_cannot_be_set_for_it() -> None:
    refuse_unread_by_evaluation(["data.eval_rows=8", "target.dtype=float32", "data={eval: [x]}"])
    with pytest.raises(UsageError, match=r"does not use drafter.num_layers, data.train:"):
        refuse_unread_by_evaluation(["drafter.num_layers=7", "data={eval: [x], train: [y]}"])


def test_a_space_inside_brackets_is_part_of_a_value_and_any_other_is_told_of() -> None:
    words = ["train.fp8=[head,", "mlp]", "train.steps=3", "data={eval:", "[a,", "b]}"]
    assert parse_overrides(words) == {
        "train.fp8": ["head", "mlp"],
        "train.steps": 3,
        "data": {"eval": ["a", "b"]},
    }
    with pytest.raises(UsageError, match="not of the form key=value") as raised:
        parse_overrides(["target.model=my", "model"])
    assert "a space inside a value needs brackets" in raised.value.hint


def test_a_recipe_is_named_to_make_as_it_was_named() -> None:
    assert make_arguments(None, ()) == ""
    assert (
        make_arguments("my recipe.yaml", ["a=1", "b=[x, y]"]) == "'RECIPE=my recipe.yaml' 'SET=a=1 b=[x, y]'"
    )


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
