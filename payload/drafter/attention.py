"""The one place where attention is computed, and where its kernel is chosen.

- ``flex``: compiled flex_attention with a BlockMask, on CUDA. Uncompiled, flex_attention writes the whole
  score matrix to memory, so it is never called so.
- ``dense``: scaled_dot_product_attention with a boolean mask, on every other device: flex_attention has no
  backward pass on a CPU.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from payload.compile.never_dense import compiled_flex_attention

Kernel = Literal["flex", "dense"]


def kernel_for(device: torch.device | str) -> Kernel:
    """The kernel that training uses on this device."""
    return "flex" if torch.device(device).type == "cuda" else "dense"


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
    """Attention of ``query[B, heads, Q, D]`` over ``key, value[B, kv heads, KV, D]``, scaled by D ** -0.5.

    ``mask`` is a BlockMask, a boolean that broadcasts to [B, heads, Q, KV] (true: may attend), or ``None``
    (sees all). Heads share keys in groups without copies of them. Returns [B, heads, Q, D].
    """
    if isinstance(mask, BlockMask):
        return compiled_flex_attention(query, key, value, mask)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
    )
