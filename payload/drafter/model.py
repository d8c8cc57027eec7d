"""The DFlash drafter's network: a few Qwen3-like layers whose queries are a block and whose keys are context
+ block.

The context is the target's features, projected once (``fc``, ``hidden_norm``) and seen by every layer through
its own key and value projections. The block is the embedding of an anchor token followed by K - 1 mask
tokens. Token embeddings and the output head belong to the target and are no part of this module.

`DFlashDrafter.forward` is what training runs. It computes only what the loss depends on: `reference_hidden` is the
same function written down plainly.

Parameters may be of another dtype than the computation (fp32 masters under bf16): each is cast where it is
used, to the dtype of the activations. Names of parameters are z-lab's (58 of them for 5 layers). Source of
the architecture: z-lab/dflash ``dflash/model.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from payload.drafter.attention import attend
from payload.drafter.config import DrafterConfig
from payload.drafter.fp8 import fp8_linear, require_sizes
from payload.drafter.masks import Mask, draft_masks
from payload.drafter.products import Product, linear

Rotary = tuple[Tensor, Tensor]


class BlockEmbeddings(NamedTuple):
    """What the slots of the blocks hold: ``anchors[B, A, H]``, one in slot 0 of each block, and ``mask[H]`` in all
    others."""

    anchors: Tensor
    mask: Tensor

    def rows(self) -> Tensor:
        """Each embedding once, [B*A + 1, H], the mask's last."""
        return torch.cat([self.anchors.flatten(0, 1), self.mask[None]])

    def spread(self, rows: Tensor, block_size: int) -> Tensor:
        """Slots [B, A*K, N] of ``rows[B*A + 1, N]``, one for each embedding."""
        anchors = rows[:-1].view(*self.anchors.shape[:2], 1, -1)
        masks = rows[-1].expand(*self.anchors.shape[:2], block_size - 1, -1)
        return torch.cat([anchors, masks], dim=2).flatten(1, 2)


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
    """The SwiGLU feed-forward layer of Qwen3. ``product`` computes it in training."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)
        self.product: Product = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def trained(self, x: Tensor) -> Tensor:
        """`forward` in the products that training chose.

        Gate and up are two: their gradients as halves of one matrix cost more than a shared product saves.
        """
        gate, up = self.product(x, self.gate_proj.weight), self.product(x, self.up_proj.weight)
        return self.product(F.silu(gate) * up, self.down_proj.weight)


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

    def seen(self, query: Tensor, keys: Tensor, values: Tensor, rotary: Rotary, mask: Mask) -> Tensor:
        """What the queries find, [B, L, heads * D], before it is projected back.

        ``query[B, L, heads * D]`` and ``keys, values[B, S + L, kv heads * D]`` are as projected; the queries stand
        where the last L keys stand.
        """
        length = query.shape[1]
        own_rotary = (rotary[0][:, -length:], rotary[1][:, -length:])
        rotated_query = rotate(self.q_norm(self._heads(query)), own_rotary).transpose(1, 2)
        rotated_keys = rotate(self.k_norm(self._heads(keys)), rotary).transpose(1, 2)
        found = attend(rotated_query, rotated_keys, self._heads(values).transpose(1, 2), mask)
        return found.transpose(1, 2).flatten(2)

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
        self,
        hidden: Tensor | BlockEmbeddings,
        context: Tensor,
        rotary: Rotary,
        mask: Mask,
        block_size: int,
        drafted_only: bool,
    ) -> Tensor:
        """The blocks after this layer, [B, L, H], given projected ``context[B, S, H]``.

        ``hidden`` is [B, L, H], or the embeddings, whose repeated row is then projected once. ``rotary`` is that
        of context and blocks. With ``drafted_only`` the result is [B, A, K - 1, H], without slot 0 of each block.
        """
        attention = self.self_attn
        maps = (attention.q_proj, attention.k_proj, attention.v_proj)
        if isinstance(hidden, BlockEmbeddings):
            embeddings, rows = hidden, hidden.rows()
            normed = self.input_layernorm(rows)
            query, key, value = (embeddings.spread(linear(normed, one.weight), block_size) for one in maps)
            own = embeddings.spread(rows, block_size)
        else:
            normed = self.input_layernorm(hidden)
            query, key, value = (linear(normed, one.weight) for one in maps)
            own = hidden
        context_key, context_value = (linear(context, one.weight) for one in maps[1:])
        found = attention.seen(
            query,
            torch.cat([context_key, key], dim=1),
            torch.cat([context_value, value], dim=1),
            rotary,
            mask,
        )
        if drafted_only:
            found, own = drafted_slots(found, block_size), drafted_slots(own, block_size)
        own = own + linear(found, attention.o_proj.weight)
        return own + self.mlp.trained(self.post_attention_layernorm(own))

    def reference(
        self, hidden: Tensor, context: Tensor, block_rotary: Rotary, all_rotary: Rotary, mask: Mask
    ) -> Tensor:
        """`forward` for ``hidden[B, L, H]`` and all slots, written plainly."""
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

    def use_fp8_mlp(self) -> None:
        """From now on train the feed-forward layers with FP8 products; refused where their sizes do not fit."""
        require_sizes("mlp", self.config.hidden_size, self.config.intermediate_size)
        for layer in self._typed_layers():
            layer.mlp.product = fp8_linear

    def project_context(self, features: Tensor) -> Tensor:
        """What every layer's keys and values are made of, [B, S, H], from ``features[B, S, n*H]``."""
        return self.hidden_norm(self.fc(features))

    def forward(
        self, features: Tensor, embeddings: BlockEmbeddings, rotary: Rotary, mask: dict[str, Mask]
    ) -> Tensor:
        """Hidden states of the drafted slots (all but slot 0 of each block) after the final norm, [B, A, K - 1, H], in
        the dtype of ``embeddings``.

        ``features[B, S, n*H]``; ``rotary`` of the positions [B, S + A*K] of context and blocks (`rotary_table`);
        ``mask`` one for each layer type (`masks.build_masks`).
        """
        embeddings = BlockEmbeddings(*embeddings)
        context = self.hidden_norm(linear(features.to(embeddings.mask.dtype), self.fc.weight))
        hidden: Tensor | BlockEmbeddings = embeddings
        last = self.config.num_layers - 1
        for index, layer in enumerate(self._typed_layers()):
            hidden = layer(
                hidden, context, rotary, mask[layer.layer_type], self.config.block_size, index == last
            )
        assert isinstance(hidden, Tensor)
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
        places = cache.length + torch.arange(positions.shape[1], device=positions.device)[None]
        masks = draft_masks(self.config, places, cache.length, filled=True)
        hidden = block_embeddings
        for index, layer in enumerate(self._typed_layers()):
            hidden = layer.draft(hidden, cache.filled(index), rotary, masks[layer.layer_type])
        return self.norm(hidden)


def reference_hidden(
    drafter: DFlashDrafter,
    features: Tensor,
    embeddings: BlockEmbeddings,
    rotary: Rotary,
    mask: dict[str, Mask],
) -> Tensor:
    """`DFlashDrafter.forward` written plainly: every slot through every layer, each map by itself."""
    size = drafter.config.block_size
    context = drafter.project_context(features.to(embeddings.mask.dtype))
    start = context.shape[1]
    block_rotary = (rotary[0][:, start:], rotary[1][:, start:])
    hidden = embeddings.spread(embeddings.rows(), size)
    for layer in drafter._typed_layers():
        hidden = layer.reference(hidden, context, block_rotary, rotary, mask[layer.layer_type])
    return drafted_slots(drafter.norm(hidden), size)


def drafted_slots(x: Tensor, block_size: int) -> Tensor:
    """``x[B, A*K, N]`` without slot 0 of each block, [B, A, K - 1, N]."""
    return x.unflatten(1, (-1, block_size))[:, :, 1:]


def rotary_table(positions: Tensor, config: DrafterConfig, dtype: torch.dtype) -> Rotary:
    """Cosines and sines [B, L, 1, D] of ``positions[B, L]``, computed in fp32 (RoPE, arXiv 2104.09864).

    Training makes them outside its compiled graph, which would compute them anew for every head that they turn.
    """
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
