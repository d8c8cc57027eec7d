"""The estimate's terms against what is really kept and allocated, on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from payload.data.generation import GenerationSettings, generate_answers
from payload.drafter.anchors import sample_anchors
from payload.drafter.from_recipe import config_of
from payload.drafter.loss import LossConfig
from payload.drafter.model import DFlashDrafter
from payload.drafter.step import drafter_loss
from payload.estimate import ANSWERS, EVALUATION, estimate
from payload.estimate_terms import NOT_KNOWN, PromptTokens, Sizes
from payload.recipe import Recipe, load_recipe
from payload.target import Target
from payload.target_shape import PUBLISHED, TargetShape
from payload.trainer.heldout import HeldOut, measure
from payload.trainer.program import _keep_less, _made_up_batch, supply_shape
from tests.payload.tiny_targets import tiny_model

SMOLLM2 = PUBLISHED["HuggingFaceTB/SmolLM2-135M-Instruct"]
DRAFTER_OF_MANY_HEADS = TargetShape(128, 160, 30, 8, 2, 64, 96, True, "bfloat16")


def kept_by_the_forward_pass(
    recipe: Recipe, target: TargetShape, monkeypatch: pytest.MonkeyPatch
) -> dict[str, int]:
    """Bytes by tensor of what the compiled drafter's forward pass keeps for its backward pass, attention being flex."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    config = config_of(recipe.drafter, target, 16)
    kept: dict[str, int] = {}

    def forward(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        nodes = list(graph.graph.nodes)
        handed_in = [node for node in nodes if node.op == "placeholder"]
        _, *saved = nodes[-1].args[0]
        for node in saved:
            value = getattr(node, "meta", {}).get("val")
            if node not in handed_in and isinstance(value, torch.Tensor):
                kept[node.name] = value.numel() * value.element_size() if _is_of_rows(value) else 0
        return boxed(graph)

    def _is_of_rows(value: torch.Tensor) -> bool:
        weights = {tuple(weight.shape) for weight in drafter.parameters()}
        return value.dtype == torch.bfloat16 and tuple(value.shape) not in weights

    drafter = DFlashDrafter(config)
    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, inputs: boxed(graph),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    drafter.compile(backend=backend, dynamic=False, fullgraph=True)
    # On a CPU flex_attention trains only uncompiled, which is enough to see what is kept.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    monkeypatch.setattr("payload.drafter.step.kernel_for", lambda device: "flex")
    monkeypatch.setattr(
        "payload.drafter.model.attend",
        lambda query, key, value, mask: flex_attention(query, key, value, block_mask=mask, enable_gqa=True),
    )
    shape, cpu = supply_shape(recipe, config, torch.bfloat16), torch.device("cpu")
    batch = _made_up_batch(shape, config, cpu)
    _, features = (torch.zeros(buffer.shape, dtype=torch.bfloat16) for buffer in shape.buffers(cpu))
    anchors = sample_anchors(
        batch.loss_mask, batch.document_ids, recipe.train.num_anchors, torch.Generator().manual_seed(0)
    )
    table = torch.zeros(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
    with _keep_less():
        drafter_loss(drafter, table, table, batch, features, anchors, LossConfig())
    return kept


def boxed(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    from functorch.compile import make_boxed_func

    made: Callable[..., Any] = make_boxed_func(graph.forward)
    return made


@pytest.mark.parametrize("target", [SMOLLM2, DRAFTER_OF_MANY_HEADS])
def test_what_a_step_keeps_for_its_backward_pass_is_what_is_counted(
    target: TargetShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"train.batch_size": 2, "data.max_length": 64, "train.num_anchors": 8, "drafter.num_layers": 3}
    recipe = load_recipe("smollm2", small)
    kept = kept_by_the_forward_pass(recipe, target, monkeypatch)
    sizes = Sizes(recipe, target, NOT_KNOWN)
    # Attention's output is kept twice in the list but once in memory: as flex gives it, and as the projection reads it.
    found = sizes.slots * sizes.config.num_attention_heads * sizes.config.head_dim * 2
    twice = [name for name, size in kept.items() if name.startswith("detach") and size == found]
    assert len(twice) == 3
    copied_features = sizes.tokens * 3 * target.hidden_size * 2
    alone = sum(kept.values()) - (len(twice) - 1) * found - copied_features
    assert sizes.saved_numbers * 2 == pytest.approx(alone, rel=0.03)


def most_allocated(work: Callable[[], Any]) -> int:
    """The most bytes that are allocated at once while it runs, beyond what was there before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        work()
    assert seen.profiler is not None
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.fixture(scope="module")
def target() -> Target:
    """Wide enough that rows of hidden states outweigh what does not grow."""
    return Target(
        tiny_model("llama", hidden_size=192, intermediate_size=512, num_attention_heads=6, num_key_value_heads=6,
                   head_dim=32, vocab_size=900, max_position_embeddings=1024)
    )  # fmt: skip


def shape_of(target: Target) -> TargetShape:
    return TargetShape.of_config({**target.config.to_dict(), "dtype": "float32"}, "tiny")


@pytest.mark.parametrize(("prompt", "new"), [(160, 12), (12, 160)])
def test_answering_allocates_what_is_counted(target: Target, prompt: int, new: int) -> None:
    recipe = load_recipe(
        "tiny-cpu",
        {
            "data.regenerate_batch": 24,
            "data.regenerate_max_new_tokens": new,
            "data.max_length": 512,
        },
    )
    phase = estimate(recipe, shape_of(target), PromptTokens(prompt, prompt))[0].phase(ANSWERS)
    weights = phase.terms[0].size_bytes
    prompts = [[1 + number] * (prompt - number % 3) for number in range(24)]
    settings = GenerationSettings(batch_size=24, max_new_tokens=new, max_length=512)
    allocated = most_allocated(lambda: generate_answers(target, prompts, set(), settings))
    assert phase.allocated_bytes - weights == pytest.approx(allocated, rel=0.15)


def test_an_evaluation_allocates_what_is_counted(target: Target) -> None:
    recipe = load_recipe(
        "tiny-cpu",
        {"data.max_length": 512, "train.eval_max_new_tokens": 24, "drafter.intermediate_size": None},
    )
    phase = estimate(recipe, shape_of(target), PromptTokens(held_out=200))[0].phase(EVALUATION)
    config = config_of(recipe.drafter, target.config, 3)
    drafter = DFlashDrafter(config).eval()
    prompts = HeldOut(tuple((1 + number,) * 200 for number in range(16)), frozenset())
    allocated = most_allocated(lambda: measure(target, drafter, prompts, 24))
    there = sum(term.size_bytes for term in phase.terms if "weights" in term.name)
    assert phase.allocated_bytes - there == pytest.approx(allocated, rel=0.15)
