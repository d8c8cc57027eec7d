from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from payload.errors import PayloadError
from payload.recipe import RECIPES, load_recipe, recipe_from_dict

MINIMAL = """\
target:
  model: some/folder
data:
  train: [rows.jsonl]
train:
  steps: 10
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_shipped_recipe_is_valid_and_survives_json(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe_from_dict(recipe.to_dict()) == recipe


def test_qwen3_8b_has_the_papers_settings_and_five_targets_for_three_drafters() -> None:
    recipe = load_recipe("qwen3-8b")
    assert (recipe.drafter.block_size, recipe.train.num_anchors, recipe.drafter.num_layers) == (16, 512, 5)
    assert (recipe.optim.lr, recipe.optim.schedule, recipe.optim.warmup, recipe.optim.clip) == (
        6e-4,
        "cosine",
        0.04,
        1,
    )
    assert (recipe.loss.gamma, recipe.data.max_length) == (7, 3072)
    assert recipe.topology.targets == (0, 1, 2, 3, 4)
    assert recipe.topology.drafters == (5, 6, 7)


def test_what_is_left_out_has_its_default_and_the_name_is_the_files(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, MINIMAL))
    assert recipe.name == "recipe"
    assert recipe.drafter.block_size == 16


def test_numbers_may_be_written_as_yaml_reads_them_for_text(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, MINIMAL + "optim: {lr: 6e-4, clip: 1}\ncompile: on\n"))
    assert recipe.optim.lr == 6e-4
    assert recipe.optim.clip == 1.0
    assert recipe.compile == "on"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (MINIMAL + "optim:\n  lrr: 1\n", 8, "optim.lrr: there is no such key"),
        (MINIMAL + "typo: 1\n", 7, "typo: there is no such key"),
        (MINIMAL + "optim:\n  lr: fast\n", 8, "optim.lr: a number is needed"),
        (MINIMAL + "optim:\n  lr: -1\n", 8, "optim.lr: must be greater than 0"),
        (MINIMAL + "optim:\n  lr: .nan\n", 8, "optim.lr: must be a finite number"),
        (MINIMAL + "optim:\n  clip: .inf\n", 8, "optim.clip: must be a finite number"),
        (MINIMAL + "loss:\n  gamma: .nan\n", 8, "loss.gamma: must be a finite number"),
        (MINIMAL + "optim:\n  warmup: 2\n", 8, "optim.warmup: must lie between 0 and 1"),
        (MINIMAL + "loss:\n  kind: mse\n", 8, "loss.kind: one of ce, dpace, kl is needed"),
        (MINIMAL + "compile: maybe\n", 7, "compile: one of auto, on, off is needed"),
        (MINIMAL + "drafter:\n  block_size: 1\n", 8, "drafter.block_size: must be at least 2"),
        (MINIMAL + "drafter:\n  layer_types: [full_attention]\n", 8, "must name 5 layers"),
        (MINIMAL + "drafter:\n  num_layers: 2.5\n", 8, "drafter.num_layers: a whole number is needed"),
        (MINIMAL + "topology:\n  targets: [0]\n  drafters: [2]\n", 9, "leaves ranks [1] without a role"),
        (MINIMAL + "topology:\n  targets: [0, 0]\n", 8, "each once"),
        (MINIMAL + "topology:\n  targets: [0, 3000000]\n", 8, "ranks count from 0 to 1023"),
        (
            MINIMAL + "topology:\n  targets: [0]\n  drafters: [999]\n",
            9,
            "leaves 998 ranks, 1 first, without a role",
        ),
        (MINIMAL + "drafter:\n  num_layers: 1000000000\n", 8, "drafter.num_layers: must be at most 128"),
        (MINIMAL + "drafter:\n  num_attention_heads: 0\n", 8, "num_attention_heads: must be greater than 0"),
        (
            MINIMAL.replace("[rows.jsonl]", "[r]\n  train_rows: -1"),
            5,
            "data.train_rows: must be greater than 0",
        ),
        (MINIMAL + "  seed: 2147483648\n", 7, "train.seed: must be at most 2,147,483,647"),
        (MINIMAL + "  seed: -1\n", 7, "train.seed: must not be negative"),
        (MINIMAL + "optim:\n  beta2: 1\n", 8, "optim.beta2: must be less than 1"),
        (MINIMAL + "  fp8: [head, head]\n", 7, "train.fp8: names head twice"),
        (MINIMAL + "train:\n  steps: 3\n", 7, "'train' stands here a second time"),
        (MINIMAL.replace("steps: 10", "steps: 0"), 6, "train.steps: must be greater than 0"),
        (MINIMAL.replace("  steps: 10", "  seed: 1"), 5, "train.steps: is missing"),
        ("- a\n", 1, "a mapping is needed"),
        ("target: {model: a\n", 2, "not YAML"),
        ("", 1, "is missing"),
    ],
)
def test_a_bad_recipe_names_file_line_and_key(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PayloadError) as caught:
        load_recipe(path)
    assert caught.value.kind == "usage"
    assert says in caught.value.message
    assert caught.value.message.startswith(f"{path}:{line}: ")


def test_all_faults_are_named_at_once_in_the_order_of_their_lines(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL + "optim: {lr: fast}\ntypo: 1\nloss:\n  kind: mse\nloss:\n  kind: ce\n")
    with pytest.raises(PayloadError) as caught:
        load_recipe(path, {"drafter.num_layers": "five"})
    assert [line.removeprefix(f"{path}:") for line in caught.value.message.splitlines()] == [
        "override: drafter.num_layers: a whole number is needed.",
        "7: optim.lr: a number is needed.",
        "8: typo: there is no such key.",
        "11: 'loss' stands here a second time.",
    ]
    assert caught.value.hint.startswith("Known keys: target, data, train")


def test_values_that_fit_and_cannot_be_meant_are_named_at_once_too(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL + "optim: {lr: -1}\ndrafter: {block_size: 1, layer_types: [odd]}\n")
    with pytest.raises(PayloadError) as caught:
        load_recipe(path)
    assert [line.removeprefix(f"{path}:") for line in caught.value.message.splitlines()] == [
        "7: optim.lr: must be greater than 0.",
        "8: drafter.block_size: must be at least 2: the anchor and one drafted token.",
        "8: drafter.layer_types: must name 5 layers, one for each.",
    ]


def test_an_unknown_name_lists_the_shipped_recipes() -> None:
    with pytest.raises(PayloadError, match="No recipe nope") as caught:
        load_recipe("nope")
    assert "tiny-cpu" in caught.value.hint


@pytest.mark.parametrize("override", [{"train.steps": 7}, {"train": {"steps": 7}}])
def test_overrides_change_one_value_whether_dotted_or_nested(override: dict[str, Any]) -> None:
    changed, plain = load_recipe("tiny-cpu", override), load_recipe("tiny-cpu")
    assert changed.train.steps == 7
    assert changed.train.batch_size == plain.train.batch_size


def test_a_bad_override_names_itself() -> None:
    with pytest.raises(PayloadError, match=r"override: train\.stepz: there is no such key"):
        load_recipe("tiny-cpu", {"train.stepz": 7})


def test_the_digest_changes_with_what_is_computed_and_not_with_how_it_is_watched() -> None:
    plain = load_recipe("tiny-cpu").digest()
    assert load_recipe("tiny-cpu", {"train.log_every": 1, "name": "other"}).digest() == plain
    assert load_recipe("tiny-cpu", {"optim.lr": 1}).digest() != plain
    assert load_recipe("tiny-cpu", {"topology.targets": [0, 1]}).digest() == plain
    assert load_recipe("tiny-cpu", {"train.from_pretrained": "runs/a"}).digest() != plain
    two = load_recipe("tiny-cpu", {"topology.drafters": [0, 1]}).digest()
    assert two == load_recipe("tiny-cpu", {"train.accumulation": 2}).digest() != plain


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda below: (
            st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(["target", "model", "x"]), below)
        ),
        max_leaves=12,
    )
)
def test_whatever_is_no_recipe_is_refused_with_words(value: Any) -> None:
    with pytest.raises(PayloadError):
        recipe_from_dict(value)


def test_what_a_resume_may_change_is_all_that_its_digest_leaves_out() -> None:
    own = load_recipe("tiny-cpu")
    changes: dict[str, Any] = {
        "name": "other",
        "compile": "off",
        "topology.targets": [0, 1],
        "train.shard": "fsdp2",
    }
    changes |= {"train.on_recompile": "count", "train.assert_improves": False}
    changes |= {
        f"train.{key}": 7 for key in ("log_every", "checkpoint_every", "eval_every", "keep_last", "prefetch")
    }
    watched = load_recipe("tiny-cpu", changes)
    assert own.changes_for_a_resume(watched) == []
    assert own.digest() == watched.digest()
    other = load_recipe("tiny-cpu", {"optim.lr": 1, "train.from_pretrained": "runs/a", **changes})
    assert own.changes_for_a_resume(other) == ["optim.lr", "train.from_pretrained"]


def test_a_recipe_file_that_is_not_there_is_called_a_file() -> None:
    with pytest.raises(PayloadError, match=r"There is no file /.*/mine\.yaml\."):
        load_recipe("mine.yaml")
