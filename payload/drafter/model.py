"""The DFlash drafter's network: a few Qwen3-like layers whose queries are a block and whose keys are context
+ block.

The context is the target's features, projected once (``fc``, ``hidden_norm``) and seen by every layer through
its own key and value projections. The block is the embedding of an anchor token followed by K - 1 mask
tokens. Token embeddings and the output head belong to the target and are no part of this module.

Parameters may be of another dtype than the computation (fp32 masters under bf16): each is cast where it is
used, to the dtype of the activations. Names of parameters are z-lab's (58 of them for 5 layers). Source of
the architecture: z-lab/dflash ``dflash/model.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from payload.drafter.attention import attend
from payload.drafter.config import DrafterConfig, block_is_causal, layer_window
from payload.drafter.masks import Mask

Rotary = tuple[Tensor, Tensor]


class Linear(nn.Linear):
    """A bias-free linear map computed in the dtype of its input."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


class MLP(nn.Module):
    """The SwiGLU feed-forward layer of Qwen3."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped-query attention with per-head normalisation of queries and keys."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, queries)
        self.k_proj = Linear(config.hidden_size, keys)
        self.v_proj = Linear(config.hidden_size, keys)
        self.o_proj = Linear(queries, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Rotated queries [B, heads, L, D] of ``x[B, L, H]``."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), rotary).transpose(1, 2)

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, each [B, kv heads, L, D], of ``x[B, L, H]``."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), rotary).transpose(1, 2)
        return keys, self._heads(self.v_proj(x)).transpose(1, 2)

    def output(self, query: Tensor, keys: Tensor, values: Tensor, mask: Mask | None) -> Tensor:
        """What the queries find, projected back to [B, L, H]."""
        return self.o_proj(attend(query, keys, values, mask).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class Layer(nn.Module):
    """One pre-norm layer; context enters through keys and values only."""

    def __init__(self, config: DrafterConfig, layer_type: str) -> None:
        super().__init__()
        self.layer_type = layer_type
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, context: Tensor, block_rotary: Rotary, all_rotary: Rotary, mask: Mask
    ) -> Tensor:
        """``hidden[B, L, H]`` of the blocks after this layer, given projected ``context[B, S, H]``."""
        normed = self.input_layernorm(hidden)
        query = self.self_attn.queries(normed, block_rotary)
        keys, values = self.self_attn.keys_values(torch.cat([context, normed], dim=1), all_rotary)
        hidden = hidden + self.self_attn.output(query, keys, values, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def draft(
        self, hidden: Tensor, past: tuple[Tensor, Tensor], rotary: Rotary, mask: Tensor | None
    ) -> Tensor:
        """Like `forward`, with the context's keys and values [B, kv heads, S, D] already computed."""
        normed = self.input_layernorm(hidden)
        query = self.self_attn.queries(normed, rotary)
        keys, values = self.self_attn.keys_values(normed, rotary)
        keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        hidden = hidden + self.self_attn.output(query, keys, values, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@dataclass
class ContextCache:
    """Each layer's keys and values of the context, [B, kv heads, capacity, D], filled up to ``length``."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int = 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        end = self.length + keys.shape[2]
        self.keys[layer][:, :, self.length : end] = keys
        self.values[layer][:, :, self.length : end] = values

    def filled(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer][:, :, : self.length], self.values[layer][:, :, : self.length]


class DFlashDrafter(nn.Module):
    """The drafter. It is made with random weights: normal of ``initializer_range``, and ones for norms."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config, layer_type) for layer_type in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def project_context(self, features: Tensor) -> Tensor:
        """What every layer's keys and values are made of, [B, S, H], from ``features[B, S, n*H]``."""
        return self.hidden_norm(self.fc(features))

    def forward(
        self,
        features: Tensor,
        context_positions: Tensor,
        block_embeddings: Tensor,
        block_positions: Tensor,
        mask: dict[str, Mask],
    ) -> Tensor:
        """Hidden states of all blocks after the final norm, [B, A*K, H], in the dtype of
        ``block_embeddings``.

        ``features[B, S, n*H]``; ``context_positions[B, S]`` and ``block_positions[B, A*K]`` int64, positions
        inside the document; ``block_embeddings[B, A*K, H]``; ``mask`` one for each layer type
        (`masks.build_masks`).
        """
        context = self.project_context(features.to(block_embeddings.dtype))
        positions = torch.cat([context_positions, block_positions], dim=1)
        all_rotary = rotary_table(positions, self.config, context.dtype)
        start = context.shape[1]
        block_rotary = (all_rotary[0][:, start:], all_rotary[1][:, start:])
        hidden = block_embeddings
        for layer in self._typed_layers():
            hidden = layer(hidden, context, block_rotary, all_rotary, mask[layer.layer_type])
        return self.norm(hidden)

    def _typed_layers(self) -> Iterable[Layer]:
        return cast("Iterable[Layer]", self.layers)

    def new_cache(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> ContextCache:
        """An empty cache for up to ``capacity`` context tokens a row."""
        shape = (batch, self.config.num_key_value_heads, capacity, self.config.head_dim)
        return ContextCache(
            keys=[torch.empty(shape, device=device, dtype=dtype) for _ in self.layers],
            values=[torch.empty(shape, device=device, dtype=dtype) for _ in self.layers],
        )

    def extend_context(self, features: Tensor, positions: Tensor, cache: ContextCache) -> None:
        """Appends the keys and values of accepted tokens: ``features[B, T, n*H]``, ``positions[B, T]``."""
        context = self.project_context(features)
        rotary = rotary_table(positions, self.config, context.dtype)
        for index, layer in enumerate(self._typed_layers()):
            cache.append(index, *layer.self_attn.keys_values(context, rotary))
        cache.length += features.shape[1]

    def draft(self, block_embeddings: Tensor, positions: Tensor, cache: ContextCache) -> Tensor:
        """Hidden states [B, K, H] of one block a row that stands right after the cached context.

        ``block_embeddings[B, K, H]``, ``positions[B, K]``. The cache is left as it was. The block may be
        shorter than ``config.block_size``.
        """
        rotary = rotary_table(positions, self.config, block_embeddings.dtype)
        masks = {
            kind: _draft_mask(kind, self.config, cache.length, positions.shape[1], positions.device)
            for kind in self.config.layer_kinds
        }
        hidden = block_embeddings
        for index, layer in enumerate(self._typed_layers()):
            hidden = layer.draft(hidden, cache.filled(index), rotary, masks[layer.layer_type])
        return self.norm(hidden)


def rotary_table(positions: Tensor, config: DrafterConfig, dtype: torch.dtype) -> Rotary:
    """Cosines and sines [B, L, 1, D] of ``positions[B, L]``, computed in fp32 (RoPE, arXiv 2104.09864)."""
    exponent = (
        torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32) / config.head_dim
    )
    angles = positions[..., None].float() * (1.0 / config.rope_theta**exponent)
    angles = torch.cat([angles, angles], dim=-1)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """``x[B, L, heads, D]`` rotated; the halves of a head are its real and imaginary parts, as in Qwen3."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _draft_mask(
    layer_type: str, config: DrafterConfig, context_length: int, block_length: int, device: torch.device
) -> Tensor | None:
    """The rule of `masks.allowed` for a single block after its context, bool [Q, KV]; ``None`` sees all."""
    causal, window = block_is_causal(layer_type, config), layer_window(layer_type, config)
    if not causal and window is None:
        return None
    query = context_length + torch.arange(block_length, device=device)[:, None]
    key = torch.arange(context_length + block_length, device=device)[None, :]
    visible = torch.ones(block_length, context_length + block_length, dtype=torch.bool, device=device)
    if causal:
        visible &= key <= query
    if window is not None:
        visible &= (query - key).abs() < window
    return visible
