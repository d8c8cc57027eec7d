"""The terms of `payload.estimate`: each a product of sizes, named after what it holds, to be checked by itself.

B rows, S tokens a row, A anchors, K slots; n target layers, H hidden, I intermediate, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from payload.drafter.config import DrafterConfig
from payload.drafter.from_recipe import config_of
from payload.recipe import Recipe
from payload.target_shape import TargetShape

CHUNK_ROWS = 5120
"""Rows of logits alive at once: `payload.drafter.loss.LossConfig.chunk_rows`, which the desk cannot import."""
PROMPTS_AT_ONCE = 16
"""Held-out prompts decoded together: `payload.trainer.heldout.PROMPTS_AT_ONCE`, likewise."""
_MASTER_BYTES, _MOMENT_BYTES, _GRADIENT_BYTES = 4, 8, 4


@dataclass(frozen=True)
class Term:
    """A part of the memory, by name."""

    name: str
    size_bytes: int


class PromptTokens(NamedTuple):
    """Tokens of the longest prompt to answer, and of the longest held-out one; None is not known: as many as an answer
    may have."""

    train: int | None = None
    held_out: int | None = None


NOT_KNOWN = PromptTokens()


class Sizes:
    """The terms, from the sizes of a recipe, its target and its prompts."""

    def __init__(self, recipe: Recipe, target: TargetShape, prompts: PromptTokens) -> None:
        self.recipe = recipe
        self.target = target
        self.config = drafter_config(recipe, target)
        self.item = target.itemsize(recipe.target.dtype)
        self.tokens = recipe.train.batch_size * recipe.data.max_length
        self.slots = recipe.train.batch_size * recipe.train.num_anchors * self.config.block_size
        self.prompts = prompts
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

    def layer_of_target(self, tokens: int) -> int:
        """The most that is alive inside one layer of the target: its input, its MLP's input, gate, up and product."""
        return tokens * (2 * self.target.hidden_size + 3 * self.target.intermediate_size) * self.item

    def keys_values(self, tokens: int) -> int:
        """Of all layers of the target."""
        width = 2 * self.target.num_key_value_heads * self.target.head_dim
        return self.target.num_hidden_layers * width * tokens * self.item

    def answers(self) -> list[Term]:
        """A batch of prompts, when the last layer reads them or the first answers are due; no drafter is there yet."""
        data = self.recipe.data
        rows, new = data.regenerate_batch, min(data.regenerate_max_new_tokens, data.max_length - 1)
        prompt = self.prompts.train or max(1, min(new, data.max_length - new))
        prompt, rows_of = min(prompt, data.max_length - 1), f"{rows:,} answers, prompts of {prompt:,} tokens"
        logits = rows * self.target.vocab_size * (self.item + (12 if data.regenerate_temperature > 0 else 0))
        reading = [
            Term("activations of one layer, reading prompts", self.layer_of_target(rows * prompt)),
            Term("the prompts' mask, twice", rows * prompt * prompt * (1 + self.item)),
        ]
        return [
            Term("the target's weights", self.target.parameters * self.item),
            Term(f"keys and values of {rows_of}", self.keys_values(rows * (prompt + new))),
            *(reading if _total(reading) > logits else [Term("logits of all rows", logits)]),
        ]

    def evaluation(self, beside_drafter: bool) -> list[Term]:
        """Held-out prompts, when the last layer reads them, their features are joined, or the drafter takes them in."""
        new, drafter = self.recipe.train.eval_max_new_tokens, self.config
        rows = min(PROMPTS_AT_ONCE, self.recipe.data.eval_rows)
        prompt = min(self.prompts.held_out or new, self.recipe.data.max_length - 1)
        kept = rows * (prompt + new + drafter.block_size)
        own = drafter.num_layers * 2 * drafter.num_key_value_heads * drafter.head_dim * kept * self.item
        features = rows * prompt * len(drafter.target_layer_ids) * drafter.hidden_size * self.item
        reading = [
            Term("the prompts' mask, twice", rows * prompt * prompt * (1 + self.item)),
            Term("activations of one layer", self.layer_of_target(rows * prompt)),
        ]
        joined, drafting = Term("the features joined", features), Term("the drafter's keys and values", own)
        return [
            Term("the target's weights", self.target.parameters * self.item),
            *(self.drafter_state() if beside_drafter else []),
            Term("the drafter's weights as exported", drafter_parameters(drafter) * self.item),
            Term(f"keys and values of {rows} prompts of {prompt:,} tokens", self.keys_values(kept)),
            Term("features of the prompts", features),
            *max(reading, [joined], [drafting], key=_total),
        ]

    def features(self, micro_batches: int) -> Term:
        """Features made or received ahead, and those in use."""
        many = "es" if micro_batches > 1 else ""
        return Term(f"features of {micro_batches} micro-batch{many}", micro_batches * self.message)

    def target_alone(self) -> list[Term]:
        prefetch = self.recipe.train.prefetch
        return [
            Term("weights", self.target.parameters * self.item),
            self.features(prefetch + 1),
            Term("activations of one layer", self.layer_of_target(self.tokens)),
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
        rounds = min(self.recipe.train.accumulation, self.recipe.train.prefetch)
        shared = -(-len(roles.drafters) // len(roles.targets)) * rounds
        step, layer = self.drafter_step(), self.layer_of_target(self.tokens)
        return [
            Term("the target's weights", self.target.parameters * self.item),
            *self.drafter_state(),
            self.features(shared),
            # The two halves of a step take turns.
            *(step if _total(step) >= layer else [Term("activations of one layer of the target", layer)]),
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
        """What a step adds at its peak: at the last logits, when the backward pass is in its first layer, or when it is
        in its last one and all gradients are there."""
        weights = drafter_parameters(self.config)
        begins = [
            Term("weights in the computation's type", weights * self.item),
            Term("a copy of the features that are finite", self.message),
            Term("activations", self.saved_numbers * self.item),
            Term("the head's gradient for hidden states", self.slots * self.config.hidden_size * self.item),
            max(self._logits, self._backward_of_one_layer, key=lambda term: term.size_bytes),
        ]
        if self._gradients_outlive:
            return begins
        ends = [Term("gradients, fp32", weights * _GRADIENT_BYTES), self._backward_of_one_layer]
        return max(begins, ends, key=_total)

    @property
    def saved_numbers(self) -> int:
        """What the compiled forward pass keeps for the backward pass. Norms' outputs, the sums after attention's
        projection and SwiGLU's product are computed again; rotated queries and keys are not."""
        config = self.config
        layers, hidden, inner = config.num_layers, config.hidden_size, config.intermediate_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        drafted = self.slots // config.block_size * (config.block_size - 1)
        # Of each layer: its input, the rotated queries, what they found; keys before and after rotation, and values.
        of_slot = layers * (hidden + 2 * queries + 3 * keys)
        # Queries before rotation, but for the first layer, where each is one of few; and what the second half of a
        # layer keeps: its input, gate and up.
        of_slot += (layers - 1) * (queries + hidden + 2 * inner)
        # The last layer's second half has the drafted slots alone, as copies; and the last norm's input.
        of_drafted = queries + 2 * hidden + 2 * inner
        of_token = layers * 3 * keys + hidden
        return of_slot * self.slots + of_drafted * drafted + of_token * self.tokens

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


def _total(terms: Iterable[Term]) -> int:
    return sum(term.size_bytes for term in terms)
