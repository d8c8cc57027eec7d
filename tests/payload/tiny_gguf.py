"""GGUF files as llama.cpp's converter writes them, of models and tokenizers that fit in a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def write_gguf(path: Path, model: Any, tokenizer: Any = None, packed: bool = False) -> None:
    """A llama model's weights, in fp32 or the matrices in Q8_0 (``packed``), and a byte-level BPE tokenizer with its
    chat template."""
    gguf = pytest.importorskip("gguf")
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, tensor in state.items():
        stem = name.removesuffix(".weight")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        if stem in heads:  # llama.cpp interleaves the rotary halves of a head
            tensor = tensor.view(heads[stem], 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        values, kind = tensor.float().contiguous().numpy(), None
        if packed and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            values = gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{prefix}{names[stem]}.weight", values, raw_dtype=kind)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    import gguf

    description = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary: dict[str, int] = description["model"]["vocab"]
    special = {token["content"] for token in description["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    writer.add_token_types([kinds[token in special] for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in description["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
