"""Tiny targets of every supported family, with random weights."""

from __future__ import annotations

from typing import Any

import torch

from payload.target import Target

FAMILIES = ("qwen3", "qwen2", "llama", "smollm3")


def tiny_model(family: str = "qwen3", seed: int = 0, **changes: Any) -> Any:
    """A transformers causal LM of 6 layers, hidden 32, vocabulary 40, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family not in ("qwen2", "smollm3"):
        values["head_dim"] = 8
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(values | changes)))


def tiny_target(family: str = "qwen3", seed: int = 0, **changes: Any) -> Target:
    return Target(tiny_model(family, seed, **changes).double())
