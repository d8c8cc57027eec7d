"""Files that are no recipe, however they are written, are refused with words that name the place."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from payload.errors import PayloadError
from payload.recipe import load_recipe, recipe_from_dict
from tests.payload.test_recipe import MINIMAL, written


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (MINIMAL + "name: !!timestamp soon\n", 7, "'soon' is not a valid value"),
        (MINIMAL + "name: !!bool perhaps\n", 7, "'perhaps' is not a valid value"),
        (MINIMAL + "name: !!int ''\n", 7, "'' is not a valid value"),
        (MINIMAL + "name: !!seq text\n", 7, "'text' is not a valid value"),
        (MINIMAL + "name: !!python/name:os.system x\n", 7, "is not a valid value"),
        (MINIMAL + 'name: "\\ud800"\n', 7, "is not a valid value"),
        (MINIMAL + 'name: "\\UFFFFFFFF"\n', 7, "not YAML"),
        (MINIMAL + "name: 2026-01-01\n", 7, "name: text is needed (quote it)"),
        (MINIMAL + "name: \x00\n", 7, "special characters are not allowed"),
        (MINIMAL + "name: &self [*self]\n", 7, "no aliases (*name) are allowed here"),
        ("a: &a [x, x]\nb: [*a, *a]\n", 2, "no aliases (*name) are allowed here"),
        (MINIMAL + "drafter:\n  layer_types: " + "[" * 3000 + "]" * 3000, 8, "nested more than 16 deep"),
        (MINIMAL + "\n".join(" " * depth + "a:" for depth in range(400)), 22, "nested more than 16 deep"),
        (MINIMAL + "? [a, b]\n: 1\n", 7, "a key must be text"),
        (MINIMAL + f"optim: {{lr: 1{'0' * 400}}}\n", 7, "optim.lr: the number is too large"),
        (MINIMAL + f"optim: {{lr: 0x1{'0' * 5000}}}\n", 7, "optim.lr: the number is too large"),
        (MINIMAL.replace("steps: 10", f"steps: 0x{'f' * 5000}"), 6, "train.steps: the number is too large"),
        (MINIMAL + f"{'k' * 900}: 1\n", 7, f"{'k' * 80}…: there is no such key"),
        (MINIMAL + "compile: [[a], {b: c}]\n", 7, "compile: one of auto, on, off is needed"),
        (MINIMAL + "compile: {a: b}\n", 7, "compile: one of auto, on, off is needed"),
    ],
)
def test_what_yaml_allows_and_no_recipe_has_names_file_and_line(
    tmp_path: Path, text: str, line: int, says: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PayloadError) as caught:
        load_recipe(path)
    assert caught.value.kind == "usage"
    assert caught.value.message.startswith(f"{path}:{line}: "), caught.value.message[:300]
    assert says in caught.value.message
    assert len(caught.value.message) < 300 + len(str(path))
    assert "Located" not in caught.value.message


PIECES = st.sampled_from(
    [
        *MINIMAL.splitlines(keepends=True), "[", "]", "{", "}", ": ", "- ", "? ", "&a ", "*a ", "<<: ", "!!",
        "!!int ", "!!float ", "!!timestamp ", "!!binary ", "!!omap ", "!!set ", "!!null ", "|\n", ">\n", "'", '"',
        "\\U", "%YAML ", "---\n", "...\n", "#", "\t", "\n", "  ", "0x", "0b", "1:2", ".inf", "~", "@", "`",
        "2026-99-99", "\x85", "\ufeff",
    ]
)  # fmt: skip


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40) | st.lists(PIECES | st.text(max_size=3), max_size=14).map("".join))
@example(text="a: !!float ''")
@example(text="%YAML 1." + "9" * 5000)
def test_any_text_is_a_recipe_or_is_refused_with_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(PayloadError):
        load_recipe(path)


@settings(max_examples=150, deadline=None)
@given(
    key=st.sampled_from(
        ["train.fp8", "train.seed", "optim.lr", "target.model", "topology.targets", "compile", "data"]
    ),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=4), below, max_size=2),
        max_leaves=8,
    ),
)
def test_any_override_is_taken_or_refused_with_words(key: str, value: Any) -> None:
    with contextlib.suppress(PayloadError):
        load_recipe("tiny-cpu", {key: value})


def test_nesting_without_end_is_refused_however_it_came() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(PayloadError, match="nested more than 16 deep"):
        recipe_from_dict({"target": deep})
    with pytest.raises(PayloadError, match="nested more than 16 deep"):
        load_recipe("tiny-cpu", {"target": deep})
    with pytest.raises(PayloadError, match="there is no such key"):
        load_recipe("tiny-cpu", {"train." * 5000 + "steps": 1})
