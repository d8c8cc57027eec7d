"""The weights that a run begins with, when its recipe names a drafter instead of chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import torch

from payload.drafter.checkpoint import load_config, load_drafter
from payload.drafter.config import DrafterConfig
from payload.errors import PayloadError
from payload.places import place
from payload.trainer.checkpoint import find_drafter

_MAY_DIFFER = {
    "initializer_range",
    "max_position_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_ids",
}
"""What of a drafter's configuration changes nothing that its weights compute."""


def find_initial(name: str, config: DrafterConfig, warn: Callable[[str], None]) -> Path:
    """The folder of the drafter that ``train.from_pretrained`` names: an export, or of a run the newest checkpoint's.

    Raises ``PayloadError`` when there is none, or it is not of ``config``, which the recipe asks for.
    """
    folder = find_drafter(place(name), "newest", warn)
    own = load_config(folder)
    differing = [
        f"{field.name} is {getattr(own, field.name)}, and the recipe's {getattr(config, field.name)}"
        for field in fields(DrafterConfig)
        if field.name not in _MAY_DIFFER and getattr(own, field.name) != getattr(config, field.name)
    ]
    if differing:
        raise PayloadError(
            f"The drafter in {folder} is not the one that the recipe asks for: {'; '.join(differing)}.",
            hint="Give the recipe that drafter's shape and target, or leave train.from_pretrained out.",
            kind="refused",
        )
    return folder


def initial_weights(name: str, config: DrafterConfig, warn: Callable[[str], None]) -> dict[str, torch.Tensor]:
    """Its state dict in fp32, on the CPU. Raises like `find_initial`, and when its tensors do not fit."""
    drafter, _ = load_drafter(find_initial(name, config, warn), dtype=torch.float32)
    return drafter.state_dict()
