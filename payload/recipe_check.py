"""Values of a recipe that fit their type but not their meaning."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from payload.drafter.config import LAYER_TYPES
from payload.located import Fault, Located

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


_POSITIVE = {
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
_NOT_NEGATIVE = {"data": ("regenerate_temperature",), "optim": ("weight_decay",), "train": ("seed",)}
_SHARES = {"optim": ("warmup", "decay", "min_lr_ratio", "beta1", "beta2"), "loss": ("dpace_alpha",)}
_BELOW_ONE = {"optim": ("beta1", "beta2")}
Problem = tuple[str, str, str]
"""Section, key, and what is wrong with the value."""


def faults_of(recipe: Recipe, located: Located) -> list[Fault]:
    """Values that cannot be meant, each with its place in ``located``, from which ``recipe`` was bound."""
    found = []
    for problems in (_numbers(recipe), _drafter(recipe), _data_and_train(recipe), _topology(recipe)):
        for section, key, problem in problems:
            part = located.value.get(section, located)
            item = part.value.get(key) or dataclasses.replace(part)
            found.append(Fault(item, f"{section}.{key}", problem))
    return found


def _numbers(recipe: Recipe) -> Iterator[Problem]:
    for section in ("drafter", "data", "loss", "optim", "train"):
        for key, value in vars(getattr(recipe, section)).items():
            if isinstance(value, float) and not math.isfinite(value):
                yield section, key, "must be a finite number"
    for limits, holds, problem in (
        (_POSITIVE, lambda value: value > 0, "must be greater than 0"),
        (_NOT_NEGATIVE, lambda value: value >= 0, "must not be negative"),
        (_BELOW_ONE, lambda value: value != 1, "must be less than 1"),
        (_SHARES, lambda value: 0 <= value <= 1, "must lie between 0 and 1"),
    ):
        for section, keys in limits.items():
            for key in keys:
                value = getattr(getattr(recipe, section), key)
                if value is not None and not holds(value):
                    yield section, key, problem
    for section, most in _AT_MOST.items():
        for key, highest in most.items():
            if getattr(getattr(recipe, section), key) > highest:
                yield section, key, f"must be at most {highest:,}"


def _drafter(recipe: Recipe) -> Iterator[Problem]:
    drafter = recipe.drafter
    kinds = drafter.layer_types or ()
    if drafter.block_size < 2:
        yield "drafter", "block_size", "must be at least 2: the anchor and one drafted token"
    if drafter.layer_types is not None and len(kinds) != drafter.num_layers:
        yield "drafter", "layer_types", f"must name {drafter.num_layers} layers, one for each"
    if unknown := sorted(set(kinds) - LAYER_TYPES.keys()):
        yield "drafter", "layer_types", f"knows no {unknown[0]}: each is {' or '.join(LAYER_TYPES)}"
    elif any(LAYER_TYPES[kind].windowed for kind in kinds) and not drafter.sliding_window:
        yield "drafter", "sliding_window", "is needed by the sliding layers"


def _data_and_train(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.data.train:
        yield "data", "train", "names no rows"
    for part in recipe.train.fp8:
        if recipe.train.fp8.count(part) > 1:
            yield "train", "fp8", f"names {part} twice"
    if recipe.train.assert_improves and not recipe.data.eval:
        yield "train", "assert_improves", "needs held-out prompts (data.eval)"


def _topology(recipe: Recipe) -> Iterator[Problem]:
    faults = 0
    for role in ("targets", "drafters"):
        ranks = getattr(recipe.topology, role)
        if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
            yield "topology", role, "must name at least one rank, each once"
        elif max(ranks) >= MOST_RANKS:
            yield "topology", role, f"names rank {max(ranks)}: ranks count from 0 to {MOST_RANKS - 1}"
        else:
            continue
        faults += 1
    if faults:
        return
    unused = set(range(recipe.topology.world_size)) - {*recipe.topology.targets, *recipe.topology.drafters}
    if unused:
        yield "topology", "drafters", f"leaves {_ranks(sorted(unused))} without a role"


def _ranks(ranks: list[int]) -> str:
    return f"ranks {ranks}" if len(ranks) <= 8 else f"{len(ranks)} ranks, {ranks[0]} first,"
