"""Drafters of real shapes with random weights and inputs, and the FLOP that one step of them is worth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from payload.data.batch import Batch
from payload.drafter.anchors import sample_anchors
from payload.drafter.config import DrafterConfig
from payload.drafter.model import DFlashDrafter
from payload.recipe import DataSpec, LossSpec, OptimSpec, Recipe, TargetSpec, TrainSpec
from payload.trainer.program import DrafterProgram
from payload.trainer.transfer import Supply

# Qwen/Qwen3-8B's drafter as published: 5 layers, features of 5 target layers, blocks of 16; 1.05 billion weights.
QWEN3_8B = DrafterConfig(
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151_936,
    block_size=16,
    mask_token_id=151_669,
    target_layer_ids=(1, 9, 17, 25, 33),
    num_target_layers=36,
)
TINY = DrafterConfig(
    hidden_size=64,
    intermediate_size=192,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=512,
    block_size=8,
    mask_token_id=511,
    target_layer_ids=(1, 3),
    num_target_layers=6,
)


@dataclass(frozen=True)
class Shape:
    """A drafter and the sizes of its micro-batch: ``rows`` of ``context`` tokens with ``anchors`` blocks each."""

    drafter: DrafterConfig
    rows: int
    context: int
    anchors: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def draft_tokens(self) -> int:
        """Slots of a micro-batch, slot 0 of each block included."""
        return self.rows * self.anchors * self.drafter.block_size


SHAPES: dict[str, Shape] = {
    "large": Shape(QWEN3_8B, rows=4, context=3072, anchors=512),
    "small": Shape(QWEN3_8B, rows=2, context=768, anchors=256),
    "tiny": Shape(TINY, rows=2, context=96, anchors=12, dtype=torch.float32),
    "tiny-gpu": Shape(replace(TINY, hidden_size=256, intermediate_size=384), rows=3, context=300, anchors=24),
}


Loss = Literal["ce", "dpace", "kl"]
Fp8 = Literal["head", "mlp"]


def recipe_of(shape: Shape, loss: Loss = "ce", fp8: tuple[Fp8, ...] = ()) -> Recipe:
    """What training at this shape would be given; no data or target of it is read here."""
    return Recipe(
        target=TargetSpec(model="random"),
        data=DataSpec(train=("random",), max_length=shape.context),
        train=TrainSpec(steps=1000, batch_size=shape.rows, num_anchors=shape.anchors, fp8=fp8),
        optim=OptimSpec(lr=1e-4),
        loss=LossSpec(kind=loss),
    )


def build_program(shape: Shape, recipe: Recipe, device: torch.device, compiled: bool) -> DrafterProgram:
    """The drafter's program as training makes it, with random weights; head and embedding are two matrices."""
    torch.manual_seed(0)
    with torch.device(device):
        drafter = DFlashDrafter(shape.drafter)
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.drafter.vocab_size, shape.drafter.hidden_size)
    head, embedding = (
        torch.empty(size, device=device, dtype=shape.dtype).normal_(0, 0.02, generator=generator)
        for _ in range(2)
    )
    return DrafterProgram(recipe, drafter, head, embedding, compiled=compiled)


def build_supply(shape: Shape, recipe: Recipe, device: torch.device, seed: int = 0) -> Supply:
    """Random tokens, all supervised, one document a row, and random features."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.rows, shape.context)
    batch = Batch(
        input_ids=torch.randint(shape.drafter.vocab_size, size, device=device, generator=generator),
        loss_mask=torch.ones(size, dtype=torch.bool, device=device),
        document_ids=torch.zeros(size, dtype=torch.int32, device=device),
        position_ids=torch.arange(shape.context, device=device).expand(size).contiguous(),
    )
    width = len(shape.drafter.target_layer_ids) * shape.drafter.hidden_size

    def states(features: int) -> torch.Tensor:
        empty = torch.empty(*size, features, device=device, dtype=shape.dtype)
        return empty.normal_(generator=generator)

    teacher = states(shape.drafter.hidden_size) if recipe.loss.kind == "kl" else None
    return Supply(batch, states(width), teacher)


def linear_flop(shape: Shape) -> float:
    """FLOP of the matrix products as trainers count them, so that their figures compare.

    6 x layer parameters x draft tokens + 6 x (fc, k_proj, v_proj) x context tokens + 4 x head x draft tokens (a
    frozen head has no weight gradient).
    """
    return (
        6 * _layer_weights(shape) * shape.draft_tokens
        + 6 * _context_weights(shape) * _context_tokens(shape)
        + (4.0 * shape.drafter.vocab_size * shape.drafter.hidden_size * shape.draft_tokens)
    )


def needed_linear_flop(shape: Shape) -> float:
    """FLOP of the matrix products that the loss and the gradients of the weights depend on.

    Less than `linear_flop`: no head, last o_proj, last MLP or last query at slot 0; the first layer's q, k and v of
    all mask slots once, without a gradient for the embeddings; no gradient for the target's features.
    """
    config, blocks = shape.drafter, shape.rows * shape.anchors
    hidden = config.hidden_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    flop = linear_flop(shape) - 4.0 * config.vocab_size * hidden * blocks
    flop -= 6.0 * blocks * (2 * hidden * queries + 3 * hidden * config.intermediate_size)
    qkv = hidden * (queries + 2 * keys)
    flop -= 6.0 * qkv * shape.draft_tokens - 4.0 * qkv * (blocks + 1)
    return flop - 2.0 * len(config.target_layer_ids) * hidden * hidden * _context_tokens(shape)


def attention_flop(shape: Shape, supply: Supply, micro_batch: int = 0) -> float:
    """FLOP of attention over the allowed pairs alone, forward (4 x D a pair and head) and backward (10 x D).

    Of the anchors that this micro-batch draws, in full-attention layers.
    """
    batch = supply.batch
    generator = torch.Generator(batch.input_ids.device).manual_seed(micro_batch)
    anchors = sample_anchors(batch.loss_mask, batch.document_ids, shape.anchors, generator)
    size = shape.drafter.block_size
    seen = batch.position_ids.gather(1, anchors.positions) * anchors.valid
    pairs = float((seen + size).sum()) * size
    return (
        14.0 * shape.drafter.head_dim * shape.drafter.num_attention_heads * shape.drafter.num_layers * pairs
    )


def _layer_weights(shape: Shape) -> int:
    config = shape.drafter
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    per_layer = 2 * queries + 2 * keys + 3 * config.intermediate_size
    return config.num_layers * config.hidden_size * per_layer


def _context_weights(shape: Shape) -> int:
    config = shape.drafter
    keys = config.num_key_value_heads * config.head_dim
    of_fc = len(config.target_layer_ids) * config.hidden_size**2
    return of_fc + config.num_layers * 2 * config.hidden_size * keys


def _context_tokens(shape: Shape) -> int:
    return shape.rows * shape.context
