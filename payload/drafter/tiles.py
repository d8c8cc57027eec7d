"""Which tiles of the mask hold anything, in closed form from the anchors.

flex_attention walks the tiles (128 queries x 128 keys) that a BlockMask lists. torch's `create_block_mask`
finds them by writing out the whole mask, which takes gigabytes, or minutes to compile. Here each block's
context is an interval of the row, so a tile needs only a comparison of a few bounds. Tiles listed as full are
not masked at all; partial ones are masked by the predicate, so that one too many costs time and never
correctness.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from payload.data.batch import document_starts
from payload.drafter.anchors import Anchors

TILE = 128


class Tiles(NamedTuple):
    """``partial`` and ``full``, bool [B, query tiles, key tiles]; a tile in neither holds no allowed pair."""

    partial: Tensor
    full: Tensor


def mask_tiles(anchors: Anchors, document_ids: Tensor, block_size: int, window: int | None) -> Tiles:
    """The tiles of the rule of `masks.allowed`, given that each document lies in one piece in its row."""
    length, device = document_ids.shape[1], document_ids.device
    queries = anchors.positions.shape[1] * block_size
    first_key = torch.arange(-(-(length + queries) // TILE), device=device) * TILE

    start = document_starts(document_ids).gather(1, anchors.positions)
    begin = {}
    for slot in (0, block_size - 1):
        begin[slot] = start if window is None else torch.maximum(start, anchors.positions + slot + 1 - window)
    end = torch.where(anchors.valid, anchors.positions, 0)
    # The first slot reaches back furthest, so its context holds that of the others; the last slot's is in
    # all.
    any_slot = _overlap(begin[0], end, first_key)
    every_slot = (begin[block_size - 1][..., None] <= first_key) & (end[..., None] >= first_key + TILE)

    first_query = torch.arange(-(-queries // TILE), device=device) * TILE
    first_block = first_query // block_size
    last_block = (first_query + TILE - 1).clamp(max=queries - 1) // block_size
    members = first_block[:, None] + torch.arange((TILE - 2) // block_size + 2, device=device)
    members = torch.minimum(members, last_block[:, None])
    context = any_slot[:, members].any(2)
    full = every_slot[:, members].all(2) & (first_query + TILE <= queries)[:, None]

    own = _overlap(length + first_block * block_size, length + (last_block + 1) * block_size, first_key)
    return Tiles(partial=(context | own) & ~full, full=full)


def ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """A BlockMask's form of ``tiles[B, Q, KV]``: counts int32 [B, 1, Q], and indices int32 [B, 1, Q, KV] with
    the listed tiles first, ascending. Both are contiguous: flex_attention's kernels rely on the head's
    stride."""
    tiles = tiles[:, None]
    listed = tiles.long()
    counts = listed.sum(-1)
    behind = counts[..., None] + (1 - listed).cumsum(-1) - 1
    rank = torch.where(tiles, listed.cumsum(-1) - 1, behind)
    column = torch.arange(tiles.shape[-1], device=tiles.device).expand_as(rank)
    indices = torch.zeros_like(rank, memory_format=torch.contiguous_format).scatter(-1, rank, column)
    return counts.int(), indices.int()


def _overlap(begin: Tensor, end: Tensor, first_key: Tensor) -> Tensor:
    """Whether [begin, end) meets each key tile, bool [..., key tiles]."""
    begin, end = begin[..., None], end[..., None]
    return (begin < end) & (begin < first_key + TILE) & (end > first_key)
