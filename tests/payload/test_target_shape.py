"""A target's sizes from whatever describes it, and words for what does not."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from payload.errors import PayloadError
from payload.estimate import estimate
from payload.gguf_shape import gguf_config
from payload.recipe import load_recipe
from payload.target_shape import PUBLISHED, TargetShape, shape_of, shape_of_target
from tests.payload.tiny_gguf import write_gguf
from tests.payload.tiny_targets import tiny_model
from tests.payload.trainer.jobs import tiny_tokenizer

GOOD = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


def test_the_shipped_recipes_targets_are_known_without_their_files() -> None:
    for name in ("tiny-cpu", "smollm2", "qwen3-8b"):
        recipe = load_recipe(name)
        assert estimate(recipe, shape_of_target(recipe.target))
    assert shape_of_target(load_recipe("smollm2").target).parameters == pytest.approx(134.5e6, rel=0.01)


@pytest.mark.parametrize(
    "file",
    ["SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct-q8_0.gguf", "SmolLM2-135M-Instruct.gguf"],
)
def test_a_gguf_file_of_a_published_model_is_known_by_its_name(file: str) -> None:
    assert shape_of("no/folder", gguf_file=file) == PUBLISHED["HuggingFaceTB/SmolLM2-135M-Instruct"]


def test_another_gguf_file_that_is_not_here_is_asked_for() -> None:
    with pytest.raises(PayloadError, match="are not known here") as caught:
        shape_of("no/folder", gguf_file="other.Q4_1.gguf")
    assert "--config" in caught.value.hint


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_files_header_gives_the_sizes_of_its_model(tied: bool, tmp_path: Path) -> None:
    words = tiny_tokenizer()
    model = tiny_model("llama", tie_word_embeddings=tied, vocab_size=len(words))
    write_gguf(tmp_path / "tiny.gguf", model, words)
    expected = TargetShape.of_config(model.config.to_dict(), "config")
    for found in (
        shape_of(str(tmp_path), gguf_file="tiny.gguf"),
        shape_of("elsewhere", tmp_path / "tiny.gguf"),
        shape_of("elsewhere", tmp_path, "tiny.gguf"),
    ):
        assert found == expected
    assert expected.tie_word_embeddings == tied


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_gguf_file_is_refused_with_words(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "tiny.gguf"
    if not path.exists():
        write_gguf(path, tiny_model("llama"))
    content = bytearray(path.read_bytes()[:1500])
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(PayloadError):
        shape_of("x", damaged)


def test_a_file_that_is_no_gguf_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(PayloadError, match="does not begin with GGUF"):
        gguf_config(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 16)
    with pytest.raises(PayloadError, match="no whole GGUF file"):
        gguf_config(tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps({**GOOD, "num_attention_heads": 0}), "num_attention_heads is 0"),
        (json.dumps({**GOOD, "hidden_size": float("inf")}), "hidden_size is inf"),
        (json.dumps({**GOOD, "vocab_size": float("nan")}), "vocab_size is nan"),
        (json.dumps({**GOOD, "hidden_size": -1}), "hidden_size is -1"),
        (json.dumps({**GOOD, "hidden_size": True}), "hidden_size is True"),
        (json.dumps({**GOOD, "hidden_size": "576"}), "hidden_size is '576'"),
        (json.dumps({**GOOD, "hidden_size": [576]}), r"hidden_size is \[576\]"),
        (json.dumps({**GOOD, "hidden_size": 10**40}), "hidden_size is one of many digits"),
        (json.dumps({**GOOD, "hidden_size": None}), "hidden_size is missing"),
        (json.dumps([GOOD]), "holds no JSON object"),
        ("null", "holds no JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "cannot be read"),
        ("\ud800", "cannot be read"),
    ],
)
def test_an_odd_config_json_is_refused_by_the_size_that_is_odd(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(PayloadError, match=says) as caught:
        shape_of("x", path)
    assert caught.value.kind == "usage"
    assert str(path) in caught.value.message
    assert len(caught.value.message) < 300 + len(str(path))


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda below: st.lists(below, max_size=2) | st.dictionaries(st.text(max_size=3), below, max_size=2),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(
    changes=st.dictionaries(
        st.sampled_from([*GOOD, "head_dim", "dtype", "torch_dtype"]), ODD | st.integers(1, 64)
    )
)
def test_any_config_gives_an_estimate_or_words(changes: dict[str, Any]) -> None:
    recipe = load_recipe("smollm2")
    with contextlib.suppress(PayloadError):
        assert estimate(recipe, TargetShape.of_config({**GOOD, **changes}, "config.json"))
