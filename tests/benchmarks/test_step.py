"""The step's bench on a CPU: the check that it makes, what its levers are, and how it counts."""

import json

import pytest
import torch

from benchmarks import step_variants
from benchmarks.step import main
from benchmarks.step_measure import _grouped
from benchmarks.step_shapes import (
    SHAPES,
    attention_flop,
    build_supply,
    linear_flop,
    needed_linear_flop,
    recipe_of,
)
from payload.drafter.model import Layer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures instead, where there is a GPU")


@pytest.mark.parametrize("loss", ["ce", "dpace", "kl"])
def test_the_fast_step_equals_the_reference_and_is_no_slower(loss, capsys):
    assert main(["--shape", "tiny", "--loss", loss]) == 0
    result = json.loads(capsys.readouterr().out)
    assert all(distance < 1e-4 for distance in result["difference"].values())


@pytest.mark.parametrize("lever", step_variants.LEVERS)
def test_a_step_without_a_lever_computes_the_same(lever, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.step.NO_SLOWER", 100.0)
    monkeypatch.setattr("benchmarks.step.CHECKED_OFF", (lever,))
    assert main(["--shape", "tiny", "--steps", "1"]) == 0
    assert Layer.forward is step_variants._layer_forward, "patches end with the variant"


def test_a_step_that_differs_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.step._LIMITS", {"torch.float32": 0.0})
    assert main(["--shape", "tiny", "--steps", "1"]) == 1
    assert "differs from the reference" in capsys.readouterr().err


def test_flop_agree_with_the_published_count():
    assert linear_flop(SHAPES["large"]) == pytest.approx(280.5e12, rel=1e-3)
    assert linear_flop(SHAPES["small"]) == pytest.approx(69.0e12, rel=1e-3)
    assert needed_linear_flop(SHAPES["large"]) == pytest.approx(266e12, rel=0.01)


def test_attention_counts_allowed_pairs_alone():
    shape = SHAPES["tiny"]
    supply = build_supply(shape, recipe_of(shape), torch.device("cpu"))
    pairs = attention_flop(shape, supply) / (14 * 32 * 4 * 2)
    queries = shape.draft_tokens
    assert queries * 8 < pairs < queries * (shape.context + 8)


def test_kernels_are_grouped_by_who_launched_them_and_then_by_name():
    def launch(correlation: int, ts: float) -> dict:
        return {
            "cat": "cuda_runtime",
            "tid": 7,
            "ts": ts,
            "dur": 1,
            "args": {"correlation": correlation},
            "name": "l",
        }

    def kernel(correlation: int, name: str) -> dict:
        return {
            "cat": "kernel",
            "name": name,
            "dur": 2000,
            "ts": 99,
            "tid": 0,
            "args": {"correlation": correlation},
        }

    head = {"cat": "user_annotation", "name": "bench:head", "tid": 7, "ts": 10, "dur": 5, "args": {}}
    events = [head, launch(1, 12), launch(2, 20), launch(3, 21), launch(4, 22)]
    events += [
        kernel(1, "nvjet_tst"),
        kernel(2, "nvjet_tst"),
        kernel(3, "triton_tem_fused_flex_attention"),
        kernel(4, "x"),
    ]
    groups, names = _grouped(events, steps=2)
    assert groups == {"attention": 1.0, "head": 1.0, "linear": 1.0, "rest": 1.0}
    assert names["head: nvjet_tst"] == 1.0
