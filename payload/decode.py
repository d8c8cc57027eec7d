"""Lossless speculative decoding with a DFlash drafter.

One round: the drafter fills a block after the newest token (the anchor) in a single pass; the target reads
anchor and drafts in a single pass and keeps the longest prefix of drafts that it would have said itself,
followed by one token of its own. What comes out is the target's own text: the same tokens when greedy, the
same distribution when sampling (Leviathan et al., arXiv 2211.17192: a draft d ~ q is kept with probability
min(1, p(d) / q(d)), and the first one refused is replaced by a draw from max(0, p - q), normalised; a DFlash
block's slots are drawn independently, so q is one distribution for each slot).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from payload.drafter.model import DFlashDrafter
from payload.drafter.row_slope import wide
from payload.errors import PayloadError
from payload.target import Target


@dataclass(frozen=True)
class Decoded:
    """``tokens``: what came after the prompt, an end-of-text token included. One entry a target forward after
    the prompt's own: ``accepted_lengths``, tokens gained by it (accepted drafts and the target's one);
    ``accepted_drafts``; ``verified_drafts``, how many drafts could have been accepted."""

    tokens: list[int]
    accepted_lengths: list[int]
    accepted_drafts: list[int]
    verified_drafts: list[int]

    def gain(self, gained: Sequence[int], size: int, eos_token_ids: Collection[int]) -> None:
        """Take in the tokens of one forward over an anchor and ``size - 1`` drafts, up to an end of text."""
        new = _until_end(gained, eos_token_ids)
        ended_early = len(new) < len(gained) or new[-1] in eos_token_ids
        self.tokens.extend(new)
        self.accepted_lengths.append(len(new))
        self.accepted_drafts.append(min(len(gained) - 1, len(new)))
        self.verified_drafts.append(min(size - 1, len(new)) if ended_early else size - 1)


@torch.no_grad()
def plain_decode(
    target: Target,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    *,
    eos_token_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> list[int]:
    """The target alone, one token a forward: at most ``max_new_tokens``, ending with an end-of-text token."""
    check_request(prompt_ids, max_new_tokens, temperature)
    cache = target.new_cache()
    ids = torch.tensor([list(prompt_ids)], device=target.device)
    tokens: list[int] = []
    while len(tokens) < max_new_tokens:
        logits = target.step(ids, cache, last_logits_only=True).logits[0]
        ids = choose(logits, temperature, generator)[None]
        tokens.append(int(ids))
        if tokens[-1] in eos_token_ids:
            break
    return tokens


@torch.no_grad()
def speculative_decode(
    target: Target,
    drafter: DFlashDrafter,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    *,
    eos_token_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> Decoded:
    """Decodes as the target alone would, with at most ``max_new_tokens`` tokens after the prompt.

    ``temperature`` 0 is greedy. ``generator`` lives on the target's device. Stops after a token of
    ``eos_token_ids``. Raises PayloadError (kind "usage") for an empty prompt or impossible numbers.
    """
    check_request(prompt_ids, max_new_tokens, temperature)
    config = drafter.config
    layer_ids, device = config.target_layer_ids, target.device
    mask_embedding = target.embedding_weight[config.mask_token_id]
    block = mask_embedding.repeat(1, config.block_size, 1)

    cache = target.new_cache()
    ids = torch.tensor([list(prompt_ids)], device=device)
    read = target.step(ids, cache, layer_ids, last_logits_only=True)
    start = ids.shape[1]
    context = drafter.new_cache(1, start + max_new_tokens, device, target.dtype)
    drafter.extend_context(read.features, torch.arange(start, device=device)[None], context)
    anchor = choose(read.logits[0], temperature, generator)
    result = Decoded([int(anchor)], [], [], [])

    while len(result.tokens) < max_new_tokens and result.tokens[-1] not in eos_token_ids:
        # All slots are drafted even if fewer are wanted: it was trained on whole blocks.
        size = min(config.block_size, max_new_tokens - len(result.tokens))
        block[:, 0] = target.embedding_weight[anchor]
        positions = torch.arange(start, start + config.block_size, device=device)[None]
        hidden = drafter.draft(block, positions, context)[0, 1:size]
        draft_logits = hidden @ target.head_weight.T
        drafts = choose(draft_logits, temperature, generator)

        read = target.step(torch.cat([anchor, drafts])[None], cache, layer_ids)
        if temperature > 0:
            p, q = _probabilities(read.logits[0], temperature), _probabilities(draft_logits, temperature)
            gained = accept_sampled(drafts, p, q, generator)
        else:
            gained = accept_greedy(drafts, read.logits[0])
        kept = len(gained)
        result.gain(gained.tolist(), size, eos_token_ids)

        if size > kept:
            cache.crop(kept - size)
        drafter.extend_context(read.features[:, :kept], positions[:, :kept], context)
        start += kept
        anchor = gained[-1:]
    return result


def accept_greedy(drafts: Tensor, target_logits: Tensor) -> Tensor:
    """The tokens gained: drafts ``drafts[D]`` up to the first that is not the target's choice, then that
    choice.

    ``target_logits[D + 1, V]``, row i following the anchor and the first i drafts. Returns int64 [1 .. D +
    1].
    """
    choice = target_logits.argmax(-1)
    accepted = int((drafts == choice[:-1]).long().cumprod(0).sum())
    return choice[: accepted + 1]


def accept_sampled(drafts: Tensor, p: Tensor, q: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The tokens gained when drafts were drawn from ``q[D, V]`` and the target's rows are ``p[D + 1, V]``."""
    p_draft, q_draft = (probs[: len(drafts)].gather(1, drafts[:, None])[:, 0] for probs in (p, q))
    threshold = torch.rand(len(drafts), device=p.device, dtype=p.dtype, generator=generator)
    accepted = int((threshold * q_draft < p_draft).long().cumprod(0).sum())
    rest = p[accepted]
    if accepted < len(drafts):
        residual = (rest - q[accepted]).clamp(min=0)
        # Nothing is left only where rounding made p and q the same: then either will do.
        rest = residual if residual.sum() > 0 else rest
    own = torch.multinomial(rest, 1, generator=generator)
    return torch.cat([drafts[:accepted], own])


def choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """One token for each row of ``logits[T, V]``, int64 [T]."""
    if temperature == 0:
        return logits.argmax(-1)
    if not len(logits):
        return torch.empty(0, dtype=torch.long, device=logits.device)
    return torch.multinomial(_probabilities(logits, temperature), 1, generator=generator)[:, 0]


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    return (wide(logits) / temperature).softmax(-1)


def _until_end(tokens: Sequence[int], eos_token_ids: Collection[int]) -> Sequence[int]:
    for index, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: index + 1]
    return tokens


def check_request(prompt_ids: Sequence[int], max_new_tokens: int, temperature: float) -> None:
    """Raises PayloadError (kind "usage") for an empty prompt or impossible numbers."""
    if not len(prompt_ids):
        raise PayloadError("a prompt is empty", "give at least one token", kind="usage")
    if max_new_tokens < 1:
        raise PayloadError(f"max_new_tokens must be at least 1, not {max_new_tokens}", kind="usage")
    if not temperature >= 0:
        raise PayloadError(f"temperature must not be negative: {temperature}", kind="usage")
