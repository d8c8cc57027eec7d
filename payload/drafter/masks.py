"""Who may attend to whom: the rule in a dense form and in flex_attention's form.

A row has A blocks of K slots, block a standing at the index ``anchors.positions[b, a]`` of its row. Queries
are the A * K slots, block by block. Keys are the row's S context tokens followed by the same A * K slots. A
query at slot k of block a sees

- context tokens of the anchor's own document at indices strictly below the anchor (the target's feature at
  the anchor does not exist yet when a block is drafted), in a sliding layer only those within the window of
  its own position anchor + k;
- slots j of its own block: all of them, or j <= k where `block_is_causal`; in a sliding layer within the
  window;
- nothing else. A block whose anchor is invalid sees no context, only its own slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from payload.data.batch import document_starts
from payload.drafter.anchors import Anchors
from payload.drafter.attention import Kernel
from payload.drafter.config import DrafterConfig, block_is_causal, layer_window
from payload.drafter.tiles import TILE, mask_tiles, ordered

Mask = Tensor | BlockMask
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def build_masks(
    config: DrafterConfig, anchors: Anchors, document_ids: Tensor, kernel: Kernel
) -> dict[str, Mask]:
    """A mask for each layer type that occurs: BlockMask ("flex") or bool [B, 1, A*K, S + A*K] ("dense")."""
    masks: dict[str, Mask] = {}
    for kind in config.layer_kinds:
        causal, window = block_is_causal(kind, config), layer_window(kind, config)
        if kernel == "flex":
            masks[kind] = flex_mask(anchors, document_ids, config.block_size, causal, window)
        else:
            masks[kind] = allowed(anchors, document_ids, config.block_size, causal, window)[:, None]
    return masks


def allowed(
    anchors: Anchors, document_ids: Tensor, block_size: int, causal: bool, window: int | None
) -> Tensor:
    """The rule as a dense bool [B, A*K, S + A*K]; true where the query may attend to the key."""
    batch, length = document_ids.shape
    num_anchors = anchors.positions.shape[1]
    device = document_ids.device

    block = torch.arange(num_anchors, device=device).repeat_interleave(block_size)
    slot = torch.arange(block_size, device=device).repeat(num_anchors)
    anchor = anchors.positions[:, block, None]
    context = torch.arange(length, device=device)
    own_document = document_ids.gather(1, anchors.positions)[:, block, None] == document_ids[:, None, :]
    sees_context = anchors.valid[:, block, None] & own_document & (context < anchor)

    distance = slot[:, None] - slot[None, :]
    sees_slot = block[:, None] == block[None, :]
    if causal:
        sees_slot &= distance >= 0
    if window is not None:
        sees_context &= anchor + slot[:, None] - context < window
        sees_slot &= distance.abs() < window
    return torch.cat([sees_context, sees_slot.expand(batch, -1, -1)], dim=2)


def draft_masks(
    config: DrafterConfig, positions: Tensor, context: int, filled: bool
) -> dict[str, Tensor | None]:
    """`draft_mask` for each layer type that occurs. Where each row's context fills all slots (``filled``) and a layer
    sees all of it and of the block, it is None."""
    masks: dict[str, Tensor | None] = {}
    for kind in config.layer_kinds:
        causal, window = block_is_causal(kind, config), layer_window(kind, config)
        sees_all = filled and not causal and window is None
        masks[kind] = None if sees_all else draft_mask(positions, context, causal, window)
    return masks


def draft_mask(positions: Tensor, context: int, causal: bool, window: int | None) -> Tensor:
    """The rule for one block a row, at ``positions[B, K]`` behind its own context: bool [B, 1, K, context + K].

    Keys are ``context`` cached tokens, each at the position of its slot, and the block. What lies in slots from a
    row's first position on is not of its context.
    """
    slots = torch.arange(context, device=positions.device)
    sees_context = (slots < positions[:, :1])[:, None].expand(-1, positions.shape[1], -1)
    slot = torch.arange(positions.shape[1], device=positions.device)
    distance = slot[:, None] - slot
    sees_slot = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        sees_context = sees_context & (positions[:, :, None] - slots < window)
        sees_slot = sees_slot & (distance.abs() < window)
    return torch.cat([sees_context, sees_slot.expand(len(positions), -1, -1)], dim=2)[:, None]


def mask_mod(
    anchors: Anchors, document_ids: Tensor, block_size: int, causal: bool, window: int | None
) -> MaskMod:
    """The rule as flex_attention's predicate over (batch, head, query index, key index); each document must lie in one
    piece.

    What a query sees of the context is an interval, and so is what it sees of its own block: two bounds are loaded
    for each query, none for a key, since the kernels ask for every pair of a partial tile. Tensors that the
    predicate closes over become inputs of a compiled graph and integers its constants, so masks of equal shapes
    share one compilation.
    """
    length = document_ids.shape[1]
    begin, end = context_interval(anchors, document_ids, block_size, window)

    def predicate(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        slot = query % block_size
        own = length + query - slot
        first, behind = own, own + (slot + 1 if causal else block_size)
        if window is not None:
            first = torch.maximum(own, own + slot - (window - 1))
            behind = behind if causal else torch.minimum(behind, own + slot + window)
        sees_context = (key >= begin[batch, query]) & (key < end[batch, query])
        return sees_context | ((key >= first) & (key < behind))

    return predicate


def context_interval(
    anchors: Anchors, document_ids: Tensor, block_size: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """The context that each query sees, as indices of its row from the first up to but not including the second,
    int32 [B, A*K] each."""
    positions, valid = anchors
    begin = document_starts(document_ids).gather(1, positions)[:, :, None].expand(-1, -1, block_size)
    if window is not None:
        slot = torch.arange(block_size, device=positions.device)
        begin = torch.maximum(begin, positions[:, :, None] + slot - (window - 1))
    end = torch.where(valid, positions, 0)[:, :, None].expand(-1, -1, block_size)
    return begin.flatten(1).int(), end.flatten(1).int()


@torch.compiler.disable(reason="a BlockMask made inside the graph that uses it gave wrong gradients")
def flex_mask(
    anchors: Anchors, document_ids: Tensor, block_size: int, causal: bool, window: int | None
) -> BlockMask:
    """The rule as a BlockMask of B x (any head) x A*K x (S + A*K); each document must lie in one piece.

    It is an input of compiled graphs, never made inside one: seen with torch 2.11 on CUDA, Inductor then
    compiled a forward pass a little and gradients several times off. A graph that must be whole refuses to
    contain it.
    """
    tiles = mask_tiles(anchors, document_ids, block_size, window)
    queries = anchors.positions.shape[1] * block_size
    return BlockMask.from_kv_blocks(
        *ordered(tiles.partial),
        *ordered(tiles.full),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod(anchors, document_ids, block_size, causal, window),
        seq_lengths=(queries, document_ids.shape[1] + queries),
    )
