"""How much GPU memory each role of a recipe will need, by arithmetic: no torch, nothing allocated.

Every term is a product of sizes, named after what it holds, so that it can be checked by itself against a profile. It
is the peak of a training step as torch counts allocated memory; what CUDA and its libraries take besides is a term of
its own. B rows, S tokens a row, A anchors, K slots; n target layers, H hidden, I intermediate, V vocabulary.

``python -m payload.estimate`` answers one request of the agent's protocol with the field ``recipe`` (resolved): the
target's config is then read where the recipe says it is. The result is `describe_estimates`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from payload.agent.protocol import Events, Request, serve
from payload.drafter.config import DrafterConfig
from payload.drafter.from_recipe import config_of
from payload.errors import PayloadError
from payload.places import place, place_or_hub_name
from payload.recipe import Recipe, recipe_from_dict
from payload.target_shape import PUBLISHED, TargetShape, shape_of

Role = Literal["target", "drafter", "both"]

GPU_BYTES = {24: 24_564 << 20, 48: 46_068 << 20, 80: 81_559 << 20, 141: 143_771 << 20}
"""Memory by a card's nominal GB, as the smallest card of that name reports it."""

_OUTSIDE_TORCH = 1 << 30
"""CUDA's context, cuBLAS's workspaces and NCCL's buffers."""
_FRAGMENTS = 0.04
"""Of torch's memory, what its allocator holds and cannot use."""
CHUNK_ROWS = 5120
"""Rows of logits alive at once: `payload.drafter.loss.LossConfig.chunk_rows`, which the desk cannot import."""
_MASTER_BYTES, _MOMENT_BYTES, _GRADIENT_BYTES = 4, 8, 4


@dataclass(frozen=True)
class Term:
    """A part of the memory, by name."""

    name: str
    size_bytes: int


@dataclass(frozen=True)
class Estimate:
    """The memory of one rank of a role."""

    role: Role
    ranks: tuple[int, ...]
    terms: tuple[Term, ...]

    @property
    def allocated_bytes(self) -> int:
        """The peak that torch will report as allocated."""
        return sum(term.size_bytes for term in self.terms)

    @property
    def needed_bytes(self) -> int:
        """What a GPU must have: with fragments, and with what is outside torch."""
        return int(self.allocated_bytes * (1 + _FRAGMENTS)) + _OUTSIDE_TORCH

    @property
    def cards(self) -> tuple[int, ...]:
        """The nominal sizes of `GPU_BYTES` that hold it."""
        return tuple(size for size, there in GPU_BYTES.items() if self.needed_bytes <= there)


def estimate(recipe: Recipe, target: TargetShape) -> list[Estimate]:
    """An estimate for each role that occurs among the recipe's ranks. Raises PayloadError for a drafter that does not
    fit the target."""
    sizes = _Sizes(recipe, target)
    targets, drafters = set(recipe.topology.targets), set(recipe.topology.drafters)
    of_role: list[tuple[Role, set[int], Iterable[Term]]] = [
        ("target", targets - drafters, sizes.target_alone()),
        ("drafter", drafters - targets, sizes.drafter_alone()),
        ("both", targets & drafters, sizes.both()),
    ]
    return [Estimate(role, tuple(sorted(ranks)), tuple(terms)) for role, ranks, terms in of_role if ranks]


class _Sizes:
    """The terms, from the sizes of a recipe and its target."""

    def __init__(self, recipe: Recipe, target: TargetShape) -> None:
        self.recipe = recipe
        self.target = target
        self.config = drafter_config(recipe, target)
        self.item = target.itemsize(recipe.target.dtype)
        self.tokens = recipe.train.batch_size * recipe.data.max_length
        self.slots = recipe.train.batch_size * recipe.train.num_anchors * self.config.block_size
        self.teacher = self.config.hidden_size if recipe.loss.kind == "kl" else 0

    @property
    def message(self) -> int:
        """Features, the teacher's states and tokens of one micro-batch: `SupplyShape.message_bytes`."""
        width = len(self.config.target_layer_ids) * self.config.hidden_size + self.teacher
        return self.tokens * (12 + width * self.item)

    @property
    def tables(self) -> int:
        """The target's embedding and head."""
        count = 1 if self.target.tie_word_embeddings else 2
        return count * self.target.vocab_size * self.target.hidden_size * self.item

    @property
    def layer_of_target(self) -> int:
        """The most that is alive inside one layer of the target: its input, its MLP's input, gate, up and product."""
        return self.tokens * (2 * self.target.hidden_size + 3 * self.target.intermediate_size) * self.item

    def features(self, micro_batches: int) -> Term:
        """Features made or received ahead, and those in use."""
        many = "es" if micro_batches > 1 else ""
        return Term(f"features of {micro_batches} micro-batch{many}", micro_batches * self.message)

    def target_alone(self) -> list[Term]:
        prefetch = self.recipe.train.prefetch
        return [
            Term("weights", self.target.parameters * self.item),
            self.features(prefetch + 1),
            Term("activations of one layer", self.layer_of_target),
        ]

    def drafter_alone(self) -> list[Term]:
        prefetch = self.recipe.train.prefetch
        return [
            Term("the target's embedding and head", self.tables),
            *self.drafter_state(),
            self.features(prefetch + 1),
            *self.drafter_step(),
        ]

    def both(self) -> list[Term]:
        roles = self.recipe.topology
        shared = -(-len(roles.drafters) // len(roles.targets)) * self.recipe.train.accumulation
        step = self.drafter_step()
        return [
            Term("the target's weights", self.target.parameters * self.item),
            *self.drafter_state(),
            self.features(shared),
            # The two halves of a step take turns.
            *(step if _total(step) >= self.layer_of_target else [Term("activations", self.layer_of_target)]),
        ]

    def drafter_state(self) -> list[Term]:
        """What lives through all steps."""
        weights = drafter_parameters(self.config)
        share = len(self.recipe.topology.drafters) if self.recipe.train.shard == "fsdp2" else 1
        return [
            Term("master weights, fp32", weights * _MASTER_BYTES // share),
            Term("AdamW's moments, fp32", weights * _MOMENT_BYTES // share),
            *(
                [Term("gradients, fp32", weights * _GRADIENT_BYTES // share)]
                if self._gradients_outlive
                else []
            ),
            *([Term("weights gathered for a step, fp32", weights * _MASTER_BYTES)] if share > 1 else []),
            *(
                [Term("the head twice in FP8", 2 * self._head_numbers)]
                if "head" in self.recipe.train.fp8
                else []
            ),
        ]

    def drafter_step(self) -> list[Term]:
        """What a step adds at its peak, when the backward pass begins or the last logits are there."""
        config, item = self.config, self.item
        weights = drafter_parameters(config)
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        # Of each layer: its input and attention's output before the residual sum, q, k, v, attention's output, gate
        # and up. Norms, rotations and SwiGLU's product are computed again.
        of_slot = 2 * config.hidden_size + 2 * queries + 2 * keys + 2 * config.intermediate_size
        of_token = 2 * keys
        saved = config.num_layers * (of_slot * self.slots + of_token * self.tokens)
        return [
            Term("weights in the computation's type", weights * item if item < _MASTER_BYTES else 0),
            Term("a copy of the features that are finite", self.message),
            Term("activations", saved * item),
            Term("the head's gradient for hidden states", self.slots * config.hidden_size * item),
            max(self._logits, self._backward_of_one_layer, key=lambda term: term.size_bytes),
        ]

    @property
    def _gradients_outlive(self) -> bool:
        """Whether gradients outlive a backward pass: between micro-batches, and in DDP's buckets."""
        return self.recipe.train.accumulation > 1 or len(self.recipe.topology.drafters) > 1

    @property
    def _head_numbers(self) -> int:
        return self.target.vocab_size * self.target.hidden_size

    @property
    def _logits(self) -> Term:
        """Of one chunk; their slope takes their place, but a divergence is computed beside them in fp32."""
        item = self.item + (4 * 4 + self.item if self.recipe.loss.kind == "kl" else 0)
        return Term("logits of one chunk", min(CHUNK_ROWS, self.slots) * self.config.vocab_size * item)

    @property
    def _backward_of_one_layer(self) -> Term:
        """Gradients of its output, of SwiGLU's product, gate and up, the product itself, and of its weights."""
        config = self.config
        rows = self.slots * (config.hidden_size + 4 * config.intermediate_size) * self.item
        one_layer = drafter_parameters(config) // config.num_layers
        return Term("backward pass of one layer", rows + one_layer * _GRADIENT_BYTES)


def drafter_config(recipe: Recipe, target: TargetShape) -> DrafterConfig:
    """The drafter that training would build; the mask token, which takes no memory, may still be unknown."""
    mask = recipe.drafter.mask_token_id
    return config_of(recipe.drafter, target, 0 if mask is None else mask)


def drafter_parameters(config: DrafterConfig) -> int:
    """Trained weights: layers, fc and norms."""
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = (
        config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size + 2) + 2 * config.head_dim
    )
    fc = len(config.target_layer_ids) * config.hidden_size * config.hidden_size
    return config.num_layers * layer + fc + 2 * config.hidden_size


def describe_estimates(estimates: Iterable[Estimate]) -> list[dict[str, Any]]:
    """Estimates as plain data."""
    return [
        {
            "role": one.role,
            "ranks": list(one.ranks),
            "terms": {term.name: term.size_bytes for term in one.terms},
            "allocated_bytes": one.allocated_bytes,
            "needed_bytes": one.needed_bytes,
            "cards": list(one.cards),
        }
        for one in estimates
    ]


def _total(terms: Iterable[Term]) -> int:
    return sum(term.size_bytes for term in terms)


def answer(request: Request, events: Events) -> dict[str, Any]:
    """Handle one request (see the module). Raises PayloadError when the target's config cannot be read."""
    recipe = recipe_from_dict(request.need("recipe", dict))
    return {"estimates": describe_estimates(estimate(recipe, _shape_in_container(recipe)))}


def _shape_in_container(recipe: Recipe) -> TargetShape:
    """The target's sizes where the target is: its folder's config.json, or what transformers makes of its name."""
    spec = recipe.target
    name = spec.model if spec.model in PUBLISHED else place_or_hub_name(spec.model)
    if spec.gguf_file is None and (name in PUBLISHED or place(spec.model).is_dir()):
        return shape_of(name)
    from transformers import AutoConfig

    options = {"gguf_file": spec.gguf_file} if spec.gguf_file else {}
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=spec.trust_remote_code, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise PayloadError(
            f"the config of the target {spec.model} cannot be read: {next(iter(str(error).splitlines()), '')}",
            "Put the model into that folder, or name another: target.model=<folder or hub name>.",
        ) from error
    return TargetShape.of_config(config.to_dict(), spec.model)


if __name__ == "__main__":
    sys.exit(serve(answer))
