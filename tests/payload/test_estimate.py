"""The estimate's arithmetic against the real models, and against memory that was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from payload.demo.target import demo_config
from payload.drafter.loss import LossConfig
from payload.drafter.model import DFlashDrafter
from payload.estimate import ANSWERS, EVALUATION, STEP, Estimate, drafter_config, drafter_parameters, estimate
from payload.estimate_terms import CHUNK_ROWS, PROMPTS_AT_ONCE, PromptTokens
from payload.recipe import Recipe, load_recipe
from payload.target_shape import PUBLISHED, TargetShape, shape_of, shape_of_target
from payload.trainer import heldout
from payload.trainer.program import supply_shape
from tests.payload.tiny_targets import FAMILIES, tiny_model


def qwen3_8b(targets: list[int], drafters: list[int], **overrides: object) -> Recipe:
    changed = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_recipe("qwen3-8b", {"topology.targets": targets, "topology.drafters": drafters, **changed})


def terms_of(one: Estimate, phase: str = STEP) -> dict[str, int]:
    return {term.name: term.size_bytes for term in one.phase(phase).terms}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_targets_weights_are_counted_as_transformers_makes_them(family: str, tmp_path: Path) -> None:
    for tied in (False, True):
        model = tiny_model(family, tie_word_embeddings=tied)
        model.config.save_pretrained(tmp_path)
        counted = shape_of(str(tmp_path)).parameters
        assert counted == pytest.approx(sum(weight.numel() for weight in model.parameters()), rel=0.02)


def test_published_sizes_are_the_published_counts() -> None:
    # Billions of weights, from the model cards.
    cards = {"Qwen/Qwen3-0.6B": 0.6, "Qwen/Qwen3-4B": 4.0, "Qwen/Qwen3-8B": 8.2, "Qwen/Qwen3-14B": 14.8}
    cards |= {"Qwen/Qwen3-1.7B": 1.7, "Qwen/Qwen3-32B": 32.8, "meta-llama/Llama-3.1-8B-Instruct": 8.0}
    for name, billions in cards.items():
        assert PUBLISHED[name].parameters == pytest.approx(billions * 1e9, rel=0.03)
    demo = TargetShape.of_config({**demo_config().to_dict(), "dtype": "float32"}, "demo")
    assert PUBLISHED["demo"] == replace(demo, max_position_embeddings=1024)


def test_the_drafters_weights_are_counted_to_the_last_one() -> None:
    recipe = load_recipe("tiny-cpu")
    config = drafter_config(recipe, shape_of("demo"))
    assert drafter_parameters(config) == sum(weight.numel() for weight in DFlashDrafter(config).parameters())


def test_a_message_is_what_really_travels() -> None:
    recipe = qwen3_8b([0], [1])
    target = shape_of("Qwen/Qwen3-8B")
    message = supply_shape(recipe, drafter_config(recipe, target), torch.bfloat16).message_bytes
    terms = terms_of(estimate(recipe, target)[0])
    assert terms["features of 3 micro-batches"] == 3 * message


def test_roles_are_those_of_the_topology() -> None:
    target = shape_of("Qwen/Qwen3-8B")
    by_role = {one.role: one for one in estimate(qwen3_8b([0, 1], [1, 2]), target)}
    assert {role: one.ranks for role, one in by_role.items()} == {
        "target": (0,),
        "drafter": (2,),
        "both": (1,),
    }
    assert by_role["both"].needed_bytes > by_role["drafter"].needed_bytes


def test_sharding_divides_the_state_among_the_drafters() -> None:
    target = shape_of("Qwen/Qwen3-8B")
    whole, sharded = (
        terms_of(estimate(qwen3_8b([0], [1, 2, 3], train__shard=shard), target)[1])
        for shard in ("ddp", "fsdp2")
    )
    assert sharded["AdamW's moments, fp32"] == whole["AdamW's moments, fp32"] // 3
    assert sharded["activations"] == whole["activations"]


def test_a_measured_step_is_met_within_fifteen_percent() -> None:
    # benchmarks.step --shape large on one H200, torch 2.11: allocated at the peak; its features are one micro-batch's.
    measured_bytes = 35.2 * 2**30
    _, drafter = estimate(qwen3_8b([0], [1]), shape_of("Qwen/Qwen3-8B"))
    terms = terms_of(drafter)
    waiting = terms["features of 3 micro-batches"] * 2 // 3
    assert sum(terms.values()) - waiting == pytest.approx(measured_bytes, rel=0.05)


def test_measured_answering_is_met_within_fifteen_percent() -> None:
    # The recipe on one H200 with batches of 2,048 prompts of at most 52 tokens: the most that the run ever allocated.
    measured_bytes = 15.6 * 2**30
    recipe = load_recipe("smollm2", {"data.regenerate_batch": 2048})
    [both] = estimate(recipe, shape_of_target(recipe.target), PromptTokens(52, 47))
    assert both.peak.name == ANSWERS
    assert both.peak.allocated_bytes == pytest.approx(measured_bytes, rel=0.15)


def test_a_phase_is_counted_where_the_recipe_has_it_and_the_role_takes_part() -> None:
    target = shape_of("Qwen/Qwen3-8B")

    def phases(**overrides: object) -> dict[str, set[str]]:
        found = estimate(qwen3_8b([0, 1], [1, 2], **overrides), target)
        return {one.role: {phase.name for phase in one.phases} for one in found}

    every = {ANSWERS, STEP, EVALUATION}
    assert phases(data__regenerate=True) == {"target": every, "drafter": {STEP}, "both": every}
    assert phases(data__eval=[])["both"] == {STEP}
    more = estimate(qwen3_8b([0], [1], data__regenerate=True, data__regenerate_batch=256), target)[0]
    assert more.peak.name == ANSWERS
    assert "answers, prompts of 1,024 tokens" in " ".join(term.name for term in more.peak.terms)


def test_weights_that_outweigh_a_small_step_have_their_gradients_counted() -> None:
    small = qwen3_8b([0], [1], train__batch_size=1, train__num_anchors=16, data__max_length=256)
    [_, drafter] = estimate(small, shape_of("Qwen/Qwen3-8B"))
    assert terms_of(drafter)["gradients, fp32"] == 4 * drafter_parameters(
        drafter_config(small, shape_of("Qwen/Qwen3-8B"))
    )


def test_numbers_that_the_desk_cannot_import_are_the_trainers_own() -> None:
    assert LossConfig().chunk_rows == CHUNK_ROWS
    assert heldout.PROMPTS_AT_ONCE == PROMPTS_AT_ONCE


def test_gradients_count_where_they_outlive_the_backward_pass() -> None:
    target = shape_of("Qwen/Qwen3-8B")

    def held(recipe: Recipe) -> bool:
        return any("gradients, fp32" in terms_of(one) for one in estimate(recipe, target))

    assert not held(qwen3_8b([0], [0]))
    assert held(qwen3_8b([0], [0], train__accumulation=2))
    assert held(qwen3_8b([0], [1, 2]))


def test_a_48_gb_card_trains_the_recipes_drafter_and_holds_its_target() -> None:
    for one in estimate(load_recipe("qwen3-8b"), shape_of("Qwen/Qwen3-8B")):
        assert 48 in one.cards
