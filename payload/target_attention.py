"""Who sees whom in the target, and the attention function through which its layers ask.

A token sees the earlier tokens of its own document, in a sliding layer those within the window alone; padding
counts as one more document. The rule has a dense form, which is the reference and what a CPU runs, and a form for
flex_attention, which is what a GPU runs: there, nothing of the size S x S is ever written.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from payload.compile.never_dense import compiled_flex_attention
from payload.data.batch import document_starts
from payload.drafter.tiles import TILE, Tiles, ordered

ATTENTION = "packed_documents"
"""The name under which transformers finds `document_attention`."""

DocumentMask = Tensor | BlockMask | None


def mask_for(input_ids: Tensor, document_ids: Tensor | None, window: int | None) -> DocumentMask:
    """The mask of one kind of layer for ``input_ids[B, S]``, in the form that their device runs.

    ``document_ids[B, S]``: each document lies in one piece; ``None``: one document a row. ``window`` is how many
    tokens a sliding layer reaches back, the query's own counted; ``None`` is without limit. ``None`` is returned
    where plain causal attention is all there is.
    """
    if document_ids is None and (window is None or window >= input_ids.shape[1]):
        return None
    if input_ids.device.type != "cuda":
        return document_mask(input_ids, document_ids, window)
    return document_block_mask(torch.zeros_like(input_ids) if document_ids is None else document_ids, window)


def document_mask(input_ids: Tensor, document_ids: Tensor | None, window: int | None) -> Tensor:
    """The rule as a dense bool, [B, 1, S, S] or [1, 1, S, S]; true where the query may attend to the key."""
    index = torch.arange(input_ids.shape[1], device=input_ids.device)
    distance = index[:, None] - index[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if document_ids is None:
        return visible[None, None]
    return (visible & (document_ids[:, :, None] == document_ids[:, None, :]))[:, None]


def document_block_mask(document_ids: Tensor, window: int | None) -> BlockMask:
    """The rule as a BlockMask of B x (any head) x S x S, in closed form, without waiting for the device.

    Each token sees one interval of its row, so masks of all documents and windows share one compiled kernel: what
    differs between them is a tensor.
    """
    first = first_visible(document_ids, window)

    def predicate(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[batch, query])

    tiles = document_tiles(first)
    return BlockMask.from_kv_blocks(
        *ordered(tiles.partial),
        *ordered(tiles.full),
        BLOCK_SIZE=TILE,
        mask_mod=predicate,
        seq_lengths=(document_ids.shape[1], document_ids.shape[1]),
    )


def first_visible(document_ids: Tensor, window: int | None) -> Tensor:
    """The first index that each token sees, int32 [B, S]; the last is its own. It never falls along a row."""
    first = document_starts(document_ids)
    if window is not None:
        index = torch.arange(document_ids.shape[1], device=document_ids.device)
        first = torch.maximum(first, index + 1 - window)
    return first.int()


def document_tiles(first: Tensor) -> Tiles:
    """Which 128 x 128 tiles hold a visible pair, and which hold nothing else, given `first_visible`.

    The queries of a tile see together what lies from the first one's first to the last one's own index, and all of
    them see what lies from the last one's first to the first one's own index.
    """
    length = first.shape[1]
    start = torch.arange(-(-length // TILE), device=first.device) * TILE
    last = (start + TILE - 1).clamp(max=length - 1)
    any_first, all_first = first[:, start, None], first[:, last, None]
    some = (start + TILE > any_first) & (start <= last[:, None])
    # A tile that reaches over the row's end is masked, as the keys there do not exist.
    full = (start >= all_first) & (start + TILE - 1 <= start[:, None]) & (start + TILE <= length)[:, None]
    return Tiles(partial=some & ~full, full=full)


def document_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: DocumentMask,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention [B, S, heads, D] as a transformers layer asks for it; a BlockMask is given by `mask_for` alone.

    ``query[B, heads, S, D]``, ``key, value[B, kv heads, S, D]``. Any other mask is left to transformers' own use of
    scaled_dot_product_attention. Raises DenseAttentionError when flex_attention would not run compiled.
    """
    if isinstance(attention_mask, BlockMask):
        # The layers of all supported families scale by D ** -0.5, as flex_attention does.
        return compiled_flex_attention(query, key, value, attention_mask).transpose(1, 2).contiguous(), None
    if query.shape[2] == 1 and attention_mask is not None and query.shape[1] != key.shape[1]:
        return _one_token(query, key, value, attention_mask), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return cast(
        "tuple[Tensor, None]", sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    )


def _one_token(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """The same for one query token: the heads that share keys stand in a row as queries, so that no key is copied.

    With a mask, scaled_dot_product_attention would need each key once for every head, many times what it reads.
    """
    group = query.shape[1] // key.shape[1]
    shared = query[:, :, 0].unflatten(1, (key.shape[1], group))
    out = scaled_dot_product_attention(shared, key, value, attn_mask=mask)
    return out.flatten(1, 2)[:, None]


def register() -> None:
    """Make `document_attention` known to transformers under `ATTENTION`, with the masks of its sdpa."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, document_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
