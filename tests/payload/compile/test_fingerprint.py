from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from payload.compile.fingerprint import (
    COMPILED_SOURCES,
    PAYLOAD_ROOT,
    architecture,
    collect_facts,
    cpu_threads,
    shapes_digest,
    sources_digest,
)
from payload.recipe import load_recipe
from tests.payload.compile.builders import FACTS, other_facts


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(asdict(FACTS))), st.text(min_size=1, max_size=20))
def test_any_other_fact_gives_another_fingerprint(name, value):
    other = other_facts(**{name: value})
    assert (other.fingerprint == FACTS.fingerprint) == (other == FACTS)


def test_the_facts_of_this_machine_are_complete_and_repeatable():
    recipe = load_recipe("tiny-cpu").to_dict()
    facts = collect_facts(recipe, "cpu")
    assert facts == collect_facts(recipe, "cpu")
    assert len(facts.fingerprint) == 16
    assert facts.torch
    assert facts.torch_git
    assert facts.arch.startswith("cpu ")


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ({"train.batch_size": 3}, False),
        ({"train.num_anchors": 7}, False),
        ({"data.max_length": 512}, False),
        ({"drafter.num_layers": 1}, False),
        ({"loss.kind": "dpace"}, False),
        ({"train.steps": 7}, True),
        ({"train.seed": 7}, True),
        ({"optim.lr": 0.1}, True),
        ({"topology.drafters": [1, 2]}, True),
    ],
)
def test_what_decides_shapes_and_graphs_changes_the_digest_and_nothing_else_does(override, same):
    plain, changed = load_recipe("tiny-cpu").to_dict(), load_recipe("tiny-cpu", override).to_dict()
    assert (shapes_digest(plain) == shapes_digest(changed)) == same


def test_the_drafters_share_the_cores_of_a_cpu_and_their_threads_are_part_of_the_facts(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    shares = [cpu_threads({"topology": {"targets": [0], "drafters": [*range(n)]}}) for n in (1, 2, 3, 16)]
    assert shares == [8, 4, 2, 1]
    assert architecture("cpu", 4).endswith(", 4 threads")


def test_editing_a_compiled_source_changes_the_digest_and_editing_another_does_not(tmp_path):
    for name in ("drafter/model.py", "trainer/program.py", "trainer/metrics.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    before = sources_digest(tmp_path)
    (tmp_path / "trainer/metrics.py").write_text("x = 2\n")
    assert sources_digest(tmp_path) == before
    (tmp_path / "drafter/model.py").write_text("x = 2\n")
    assert sources_digest(tmp_path) != before


def test_another_version_of_transformers_changes_the_digest_as_the_targets_layers_are_its(monkeypatch):
    before = sources_digest(PAYLOAD_ROOT)
    monkeypatch.setattr("payload.compile.fingerprint.transformers_version", lambda: "0.0")
    assert sources_digest(PAYLOAD_ROOT) != before


def test_every_compiled_source_that_is_listed_exists():
    assert [entry for entry in COMPILED_SOURCES if not (PAYLOAD_ROOT / entry).exists()] == []
