"""An exported drafter as its readers see it: z-lab's code before and after a key moved, servers, transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from payload.drafter.checkpoint import save_drafter
from payload.drafter.config import FULL, SLIDING, DrafterConfig, block_is_causal, layer_window
from payload.drafter.model import DFlashDrafter
from tests.payload.drafter.builders import tiny_config

CONFIGS = [
    {},
    {"layer_types": (SLIDING, FULL), "sliding_window": 8},
    {"layer_types": (SLIDING, SLIDING), "sliding_window": 8},
    {"layer_types": (SLIDING, SLIDING), "sliding_window": 8, "causal": False},
    {"causal": True, "rope_theta": 5e5},
]


@pytest.fixture(params=range(len(CONFIGS)))
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[DrafterConfig, dict[str, Any], Path]:
    config = tiny_config(**CONFIGS[request.param])
    torch.manual_seed(0)
    folder = save_drafter(tmp_path / "drafter", DFlashDrafter(config), config)
    return config, json.loads((folder / "config.json").read_text()), folder


Exported = tuple[DrafterConfig, dict[str, Any], Path]


def test_z_labs_code_finds_the_block_and_the_layers_before_and_after_the_key_moved(
    exported: Exported,
) -> None:
    config, content, _ = exported
    inner = content["dflash_config"]
    older = (content["block_size"], inner["target_layer_ids"], inner["mask_token_id"])
    newer = (inner["block_size"], inner["target_layer_ids"], inner["mask_token_id"])
    assert older == newer == (config.block_size, list(config.target_layer_ids), config.mask_token_id)
    assert content["rope_theta"] == content["rope_parameters"]["rope_theta"] == config.rope_theta


def test_serving_engines_attend_as_training_did(exported: Exported) -> None:
    """A flag in either place decides for all layers; without one sliding layers are causal and full ones are not."""
    config, content, _ = exported
    for place in (content.get("is_causal"), content["dflash_config"].get("causal")):
        for kind in content["layer_types"]:
            causal = kind == "sliding_attention" if place is None else place
            window = content["sliding_window"] if kind == "sliding_attention" else None
            assert causal == block_is_causal(kind, config)
            assert window == layer_window(kind, config)
    assert content["use_sliding_window"] == ("sliding_attention" in content["layer_types"])


def test_transformers_reads_it_as_the_qwen3_that_it_is_shaped_like(exported: Exported) -> None:
    from transformers import AutoConfig, Qwen3Config

    config, _, folder = exported
    read = AutoConfig.from_pretrained(folder)
    assert isinstance(read, Qwen3Config)
    assert (read.hidden_size, read.intermediate_size) == (config.hidden_size, config.intermediate_size)
    assert (read.num_attention_heads, read.num_key_value_heads) == (4, 2)
    assert (read.num_hidden_layers, read.head_dim) == (config.num_layers, config.head_dim)
    assert read.vocab_size == config.vocab_size
    assert tuple(read.layer_types) == config.layer_types
    assert read.rope_parameters["rope_theta"] == config.rope_theta
    assert not read.tie_word_embeddings
    assert read.dflash_config["target_layer_ids"] == list(config.target_layer_ids)
    if SLIDING in config.layer_types:
        assert read.sliding_window == config.sliding_window
