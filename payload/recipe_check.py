"""Values of a recipe that fit their type but not their meaning."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from payload.drafter.config import LAYER_TYPES
from payload.errors import PayloadError
from payload.recipe_yaml import Located

if TYPE_CHECKING:
    from payload.recipe import Recipe

MOST_RANKS = 1024
"""Far more than one job has here; a rank beyond them is a slip of the pen."""
_AT_MOST = {
    "drafter": {"num_layers": 128, "block_size": 256},
    "data": {"max_length": 1 << 20, "regenerate_batch": 1 << 16, "regenerate_max_new_tokens": 1 << 20},
    "train": {
        "batch_size": 1 << 16,
        "num_anchors": 1 << 20,
        "accumulation": 1 << 16,
        "eval_max_new_tokens": 1 << 20,
        "prefetch": 64,
        "seed": (1 << 31) - 1,
    },
}
"""No GPU holds more; what grows with these numbers would not end, or would not fit any memory of the desk."""


def check(recipe: Recipe, located: Located) -> None:
    """Raises ``PayloadError`` (kind usage) with the place of the first value that cannot be meant."""

    def refuse(section: str, key: str, problem: str) -> None:
        part = located.value.get(section, located)
        item = part.value.get(key, part) if isinstance(part.value, dict) else part
        raise PayloadError(f"{item.where}: {section}.{key} {problem}.", kind="usage")

    positive = {
        "drafter": (
            "num_layers", "initializer_range", "sliding_window", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "head_dim",
        ),
        "data": (
            "train_rows", "eval_rows", "max_length", "min_loss_tokens", "regenerate_batch",
            "regenerate_max_new_tokens",
        ),
        "train": (
            "steps", "batch_size", "num_anchors", "accumulation", "log_every", "checkpoint_every", "eval_every",
            "eval_max_new_tokens", "keep_last", "prefetch",
        ),
        "optim": ("lr", "clip", "eps"),
    }  # fmt: skip
    for section in ("drafter", "data", "loss", "optim", "train"):
        for key, value in vars(getattr(recipe, section)).items():
            if isinstance(value, float) and not math.isfinite(value):
                refuse(section, key, "must be a finite number")
    for section, keys in positive.items():
        for key in keys:
            value = getattr(getattr(recipe, section), key)
            if value is not None and value <= 0:
                refuse(section, key, "must be greater than 0")
    for section, limits in _AT_MOST.items():
        for key, most in limits.items():
            if getattr(getattr(recipe, section), key) > most:
                refuse(section, key, f"must be at most {most:,}")
    for section, key in (("data", "regenerate_temperature"), ("optim", "weight_decay"), ("train", "seed")):
        if getattr(getattr(recipe, section), key) < 0:
            refuse(section, key, "must not be negative")
    for key in ("beta1", "beta2"):
        if getattr(recipe.optim, key) == 1:
            refuse("optim", key, "must be less than 1")
    for section, key in (
        ("optim", "warmup"), ("optim", "decay"), ("optim", "min_lr_ratio"), ("optim", "beta1"), ("optim", "beta2"),
        ("loss", "dpace_alpha"),
    ):  # fmt: skip
        if not 0 <= getattr(getattr(recipe, section), key) <= 1:
            refuse(section, key, "must lie between 0 and 1")
    if recipe.drafter.block_size < 2:
        refuse("drafter", "block_size", "must be at least 2: the anchor and one drafted token")
    if (
        recipe.drafter.layer_types is not None
        and len(recipe.drafter.layer_types) != recipe.drafter.num_layers
    ):
        refuse("drafter", "layer_types", f"must name {recipe.drafter.num_layers} layers, one for each")
    kinds = recipe.drafter.layer_types or ()
    if unknown := sorted(set(kinds) - LAYER_TYPES.keys()):
        refuse("drafter", "layer_types", f"knows no {unknown[0]}: each is {' or '.join(LAYER_TYPES)}")
    if any(LAYER_TYPES[kind].windowed for kind in kinds) and not recipe.drafter.sliding_window:
        refuse("drafter", "sliding_window", "is needed by the sliding layers")
    if not recipe.data.train:
        refuse("data", "train", "names no rows")
    for part in recipe.train.fp8:
        if recipe.train.fp8.count(part) > 1:
            refuse("train", "fp8", f"names {part} twice")
    if recipe.train.assert_improves and not recipe.data.eval:
        refuse("train", "assert_improves", "needs held-out prompts (data.eval)")
    for role in ("targets", "drafters"):
        ranks = getattr(recipe.topology, role)
        if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
            refuse("topology", role, "must name at least one rank, each once")
        if max(ranks) >= MOST_RANKS:
            refuse("topology", role, f"names rank {max(ranks)}: ranks count from 0 to {MOST_RANKS - 1}")
    unused = set(range(recipe.topology.world_size)) - {*recipe.topology.targets, *recipe.topology.drafters}
    if unused:
        refuse("topology", "drafters", f"leaves {_ranks(sorted(unused))} without a role")


def _ranks(ranks: list[int]) -> str:
    return f"ranks {ranks}" if len(ranks) <= 8 else f"{len(ranks)} ranks, {ranks[0]} first,"
