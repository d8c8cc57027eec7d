"""The benchmarks of the target's features and of both roles on one device run, and measure the right thing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import colocated, features
from payload.trainer.metrics import drafter_step_flops
from payload.trainer.program import build_step

CPU = torch.device("cpu")


def test_features_are_compared_with_transformers_on_every_layout() -> None:
    found = features.measure("tiny", CPU, repeats=1, layouts=features.LAYOUTS["tiny"])
    json.dumps(found)
    assert [one["layout"] for one in found["results"]] == [one.name for one in features.LAYOUTS["tiny"]]
    assert all(one["error"] < 1e-5 for one in found["results"])
    assert "Ktok/s" in features.describe(found)


def test_rows_are_filled_with_documents_of_about_the_layouts_length() -> None:
    batch = features.packed_batch(features.Layout("", 2, 2000, 100), 50, CPU)
    assert batch.document_ids.min() == 0
    sizes = torch.cat([row.unique_consecutive(return_counts=True)[1][:-1] for row in batch.document_ids])
    assert ((sizes >= 50) & (sizes < 150)).all()
    assert (batch.position_ids == 0).sum() == len(sizes) + 2


def test_useful_flops_count_the_weights_of_the_layers_and_the_visible_pairs() -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, vocab_size=32,
    )  # fmt: skip
    documents = torch.tensor([[0, 0, 0, 1, 1, -1]])
    weights = 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16
    assert features.useful_flops(config, [0, 2], documents) == 3 * (2 * weights * 6 + 4 * 2 * 4 * (6 + 3))


def test_colocated_halves_and_both_are_measured_on_the_trainers_own_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = colocated.CASES["tiny"][0]
    small = replace(case, layout=features.Layout("small", 1, 120, 30), anchors=4)
    monkeypatch.setitem(colocated.CASES, "tiny", (small,))
    built = []

    def build(*arguments):
        built.append(build_step(*arguments))
        return built[-1]

    monkeypatch.setattr(colocated, "build_step", build)
    found = colocated.measure("tiny", CPU, repeats=1)
    json.dumps(found)
    assert set(found["cases"][0]["ms"]) == {"target", "drafter", "in turn"}
    assert "samples/s" in colocated.describe(found)
    assert built[0].target is not None
    assert built[0].drafter is not None
    assert (
        drafter_step_flops(
            colocated.recipe_of("tiny", colocated.Path("x"), small), built[0].drafter.drafter.config
        )
        > 0
    )
