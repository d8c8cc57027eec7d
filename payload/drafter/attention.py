"""The one place where attention is computed, and where its kernel is chosen.

- ``flex``: compiled flex_attention with a BlockMask, on CUDA. Uncompiled, flex_attention writes the whole
  score matrix to memory, so it is never called so.
- ``dense``: scaled_dot_product_attention with a boolean mask, on every other device: flex_attention has no
  backward pass on a CPU.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from payload.compile.never_dense import compiled_flex_attention

Kernel = Literal["flex", "dense"]


def kernel_for(device: torch.device | str) -> Kernel:
    """The kernel that training uses on this device."""
    return "flex" if torch.device(device).type == "cuda" else "dense"


def kernel_of(mask: Tensor | BlockMask | None) -> Kernel:
    """The kernel that `attend` runs for this mask."""
    return "flex" if isinstance(mask, BlockMask) else "dense"


# Options of flex_attention's kernels, by compute capability and head size, where others than torch's own choice
# were measured to be faster at a drafter's masks. Their tiles must divide those of the mask.
TUNED: dict[tuple[tuple[int, int], int], dict[str, Any]] = {}


def kernel_options(query: Tensor) -> dict[str, Any]:
    """The options for queries [B, heads, Q, D] in half precision on their device; empty leaves the choice to torch."""
    if not query.is_cuda or query.dtype.itemsize > 2:
        return {}
    return TUNED.get((_capability(query.device.index or 0), query.shape[-1]), {})


@torch.compiler.assume_constant_result
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
    """Attention of ``query[B, heads, Q, D]`` over ``key, value[B, kv heads, KV, D]``, scaled by D ** -0.5.

    ``mask`` is a BlockMask, a boolean that broadcasts to [B, heads, Q, KV] (true: may attend), or ``None``
    (sees all). Heads share keys in groups without copies of them. Returns [B, heads, Q, D].
    """
    if isinstance(mask, BlockMask):
        return compiled_flex_attention(query, key, value, mask, kernel_options(query))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
    )
