"""The drafter that a recipe asks for; no torch, so that the desk can ask too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from payload.drafter.config import DrafterConfig
from payload.recipe import DrafterSpec


def config_of(spec: DrafterSpec, target: Any, mask_token_id: int) -> DrafterConfig:
    """The configuration of ``spec`` for a target, given its transformers config or its `TargetShape`.

    Raises ``PayloadError`` where the two do not fit.
    """
    config = DrafterConfig.for_target(
        target,
        mask_token_id=mask_token_id,
        num_layers=spec.num_layers,
        block_size=spec.block_size,
        target_layer_ids=spec.target_layer_ids,
        layer_types=spec.layer_types,
        sliding_window=spec.sliding_window,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
    )
    return replace(config, initializer_range=spec.initializer_range)
