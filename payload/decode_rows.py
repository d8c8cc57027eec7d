"""Greedy decoding of several prompts at once: each row's text is the one that `payload.decode` gives it alone.

Rows differ in length and accept different numbers of drafts; each has its own place in the caches (`RowCache`), so
that nothing is padded between tokens and every token sees exactly what it would see alone. One round waits for the
device once, for the tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from payload.decode import Decoded, check_request
from payload.drafter.masks import draft_masks
from payload.drafter.model import DFlashDrafter, Layer, rotary_table
from payload.row_cache import RowCache
from payload.target import Target


@torch.no_grad()
def plain_decode_rows(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
) -> list[list[int]]:
    """`plain_decode` of each prompt, greedy."""
    cache, newest, _ = _read_prompts(target, prompts, max_new_tokens, (), spare=0)
    texts = [[token] for token in newest.tolist()]
    going = list(range(len(prompts)))
    while going := _going_on(going, texts, max_new_tokens, eos_token_ids, [cache]):
        newest = torch.tensor([texts[number][-1] for number in going], device=target.device)
        logits = target.step_rows(newest[:, None], cache).logits
        cache.advance([1] * len(going))
        for number, token in zip(going, logits[:, 0].argmax(-1).tolist(), strict=True):
            texts[number].append(token)
    return texts


@torch.no_grad()
def speculative_decode_rows(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
) -> list[Decoded]:
    """`speculative_decode` of each prompt, greedy. Raises PayloadError (kind "usage") for an empty prompt."""
    config, embedding = drafter.config, target.embedding_weight
    cache, newest, features = _read_prompts(
        target, prompts, max_new_tokens, config.target_layer_ids, spare=config.block_size
    )
    context = RowCache(config.num_layers, len(prompts), cache.capacity, target.device)
    _extend_context(drafter, features, context)
    context.advance([len(prompt) for prompt in prompts])
    decoded = [Decoded([token], [], [], []) for token in newest.tolist()]
    texts = [one.tokens for one in decoded]
    mask = embedding[config.mask_token_id].expand(config.block_size - 1, -1)
    going = list(range(len(prompts)))
    while going := _going_on(going, texts, max_new_tokens, eos_token_ids, [cache, context]):
        anchors = torch.tensor([texts[number][-1] for number in going], device=target.device)
        block = torch.cat([embedding[anchors][:, None], mask.expand(len(going), -1, -1)], dim=1)
        drafts = (_draft(drafter, block, context)[:, 1:] @ target.head_weight.T).argmax(-1)
        read = target.step_rows(torch.cat([anchors[:, None], drafts], dim=1), cache, config.target_layer_ids)
        choice = read.logits.argmax(-1)
        accepted = (drafts == choice[:, :-1]).long().cumprod(1).sum(1)
        kept = []
        for number, (agreed, *own) in zip(
            going, torch.cat([accepted[:, None], choice], dim=1).tolist(), strict=True
        ):
            size = min(config.block_size, max_new_tokens - len(texts[number]))
            kept.append(min(agreed + 1, size))
            decoded[number].gain(own[: kept[-1]], size, eos_token_ids)
        _extend_context(drafter, read.features, context)
        cache.advance(kept)
        context.advance(kept)
    return decoded


def _read_prompts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    layer_ids: Sequence[int],
    spare: int,
) -> tuple[RowCache, Tensor, Tensor]:
    """A cache that holds the prompts, the token [B] that follows each, and the features [B, longest, n*H]."""
    for prompt in prompts:
        check_request(prompt, max_new_tokens, temperature=0.0)
    lengths = [len(prompt) for prompt in prompts]
    ids = torch.tensor(
        [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts], device=target.device
    )
    cache = RowCache(
        len(target.model.model.layers), len(prompts), max(lengths) + max_new_tokens + spare, target.device
    )
    last = torch.tensor(lengths, device=target.device) - 1
    read = target.step_rows(ids, cache, layer_ids, logits_at=last)
    cache.advance(lengths)
    return cache, read.logits[:, 0].argmax(-1), read.features


def _going_on(
    going: list[int],
    texts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_ids: Collection[int],
    caches: Sequence[RowCache],
) -> list[int]:
    """Those of the prompts ``going`` whose text is not over; the caches keep their rows alone."""
    places = [
        place
        for place, number in enumerate(going)
        if len(texts[number]) < max_new_tokens and texts[number][-1] not in eos_token_ids
    ]
    if places and len(places) < len(going):
        for cache in caches:
            cache.keep(places)
    return [going[place] for place in places]


def _extend_context(drafter: DFlashDrafter, features: Tensor, context: RowCache) -> None:
    """Write every layer's keys and values of the next tokens, ``features[B, T, n*H]``."""
    projected = drafter.project_context(features)
    rotary = rotary_table(context.positions(features.shape[1]), drafter.config, projected.dtype)
    for index, layer in enumerate(_layers(drafter)):
        context.update(*layer.self_attn.keys_values(projected, rotary), index)


def _draft(drafter: DFlashDrafter, block: Tensor, context: RowCache) -> Tensor:
    """`DFlashDrafter.draft` of ``block[B, K, H]`` behind each row's own context."""
    positions = context.positions(block.shape[1])
    rotary = rotary_table(positions, drafter.config, block.dtype)
    masks = draft_masks(drafter.config, positions, context.bound, filled=False)
    hidden = block
    for index, layer in enumerate(_layers(drafter)):
        hidden = layer.draft(hidden, context.slots(index, context.bound), rotary, masks[layer.layer_type])
    return drafter.norm(hidden)


def _layers(drafter: DFlashDrafter) -> Iterable[Layer]:
    return cast("Iterable[Layer]", drafter.layers)
