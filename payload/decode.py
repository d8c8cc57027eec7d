"""Lossless speculative decoding with a DFlash drafter, and how much it gains.

One round: the drafter fills a block after the newest token (the anchor) in a single pass; the target reads
anchor and drafts in a single pass and keeps the longest prefix of drafts that it would have said itself,
followed by one token of its own. What comes out is the target's own text: the same tokens when greedy, the
same distribution when sampling (Leviathan et al., arXiv 2211.17192: a draft d ~ q is kept with probability
min(1, p(d) / q(d)), and the first one refused is replaced by a draw from max(0, p - q), normalised; a DFlash
block's slots are drawn independently, so q is one distribution for each slot).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from payload.drafter.model import DFlashDrafter
from payload.errors import PayloadError
from payload.target import Target

T = TypeVar("T")


@dataclass(frozen=True)
class Decoded:
    """``tokens``: what came after the prompt, an end-of-text token included. One entry a target forward after
    the prompt's own: ``accepted_lengths``, tokens gained by it (accepted drafts and the target's one);
    ``accepted_drafts``; ``verified_drafts``, how many drafts could have been accepted."""

    tokens: list[int]
    accepted_lengths: list[int]
    accepted_drafts: list[int]
    verified_drafts: list[int]


@dataclass(frozen=True)
class Acceptance:
    """What `evaluate` measured over all prompts.

    ``mean_accepted_length``: tokens gained a target forward. ``by_position[k - 1]``: of the forwards that
    could accept slot k, the share that accepted slots 1 .. k. ``speedup``: tokens a second by wall clock,
    prompts included, over those of plain decoding in the same run; ``identical``: prompts whose text equals
    plain decoding's token for token, expected of all when greedy in exact arithmetic. Both ``None`` if plain
    decoding was not run, ``identical`` also when sampling.
    """

    mean_accepted_length: float
    by_position: tuple[float, ...]
    prompts: int
    tokens: int
    target_forwards: int
    seconds: float
    plain_seconds: float | None
    speedup: float | None
    identical: int | None


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
    _check_request(prompt_ids, max_new_tokens, temperature)
    cache = target.new_cache()
    ids = torch.tensor([list(prompt_ids)], device=target.device)
    tokens: list[int] = []
    while len(tokens) < max_new_tokens:
        logits = target.step(ids, cache, last_logits_only=True).logits[0]
        ids = _choose(logits, temperature, generator)[None]
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
    _check_request(prompt_ids, max_new_tokens, temperature)
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
    anchor = _choose(read.logits[0], temperature, generator)
    result = Decoded([int(anchor)], [], [], [])

    while len(result.tokens) < max_new_tokens and result.tokens[-1] not in eos_token_ids:
        # All slots are drafted even if fewer are wanted: it was trained on whole blocks.
        size = min(config.block_size, max_new_tokens - len(result.tokens))
        block[:, 0] = target.embedding_weight[anchor]
        positions = torch.arange(start, start + config.block_size, device=device)[None]
        hidden = drafter.draft(block, positions, context)[0, 1:size]
        draft_logits = hidden @ target.head_weight.T
        drafts = _choose(draft_logits, temperature, generator)

        read = target.step(torch.cat([anchor, drafts])[None], cache, layer_ids)
        if temperature > 0:
            p, q = _probabilities(read.logits[0], temperature), _probabilities(draft_logits, temperature)
            gained = accept_sampled(drafts, p, q, generator)
        else:
            gained = accept_greedy(drafts, read.logits[0])
        kept = len(gained)

        new = _until_end(gained.tolist(), eos_token_ids)
        accepted = min(kept - 1, len(new))
        ended_early = len(new) < kept or new[-1] in eos_token_ids
        result.tokens.extend(new)
        result.accepted_lengths.append(len(new))
        result.accepted_drafts.append(accepted)
        result.verified_drafts.append(min(size - 1, len(new)) if ended_early else size - 1)

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


def evaluate(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    *,
    eos_token_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
    compare_plain: bool = True,
) -> Acceptance:
    """Decodes every prompt (token ids) and reports acceptance, and speed and text against plain decoding.

    Raises PayloadError (kind "usage") without prompts.
    """
    if not prompts:
        raise PayloadError("there are no prompts to evaluate on", "give held-out rows", kind="usage")

    def speculative(prompt: Sequence[int]) -> Decoded:
        return speculative_decode(
            target,
            drafter,
            prompt,
            max_new_tokens,
            temperature,
            eos_token_ids=eos_token_ids,
            generator=generator,
        )

    def plain(prompt: Sequence[int]) -> list[int]:
        return plain_decode(
            target, prompt, max_new_tokens, temperature, eos_token_ids=eos_token_ids, generator=generator
        )

    speculative(prompts[0])  # kernels are loaded and chosen outside the measured time
    decoded, seconds = _timed(lambda: [speculative(prompt) for prompt in prompts], target.device)
    tokens = sum(len(d.tokens) for d in decoded)
    plain_seconds = speedup = identical = None
    if compare_plain:
        plain(prompts[0])
        texts, plain_seconds = _timed(lambda: [plain(prompt) for prompt in prompts], target.device)
        speedup = (tokens / seconds) / (sum(map(len, texts)) / plain_seconds)
        if temperature == 0:
            identical = sum(d.tokens == text for d, text in zip(decoded, texts, strict=True))
    lengths = [length for d in decoded for length in d.accepted_lengths]
    return Acceptance(
        mean_accepted_length=sum(lengths) / len(lengths) if lengths else 0.0,
        by_position=_by_position(decoded, drafter.config.block_size),
        prompts=len(prompts),
        tokens=tokens,
        target_forwards=len(lengths),
        seconds=seconds,
        plain_seconds=plain_seconds,
        speedup=speedup,
        identical=identical,
    )


def _by_position(decoded: Sequence[Decoded], block_size: int) -> tuple[float, ...]:
    accepted = [n for d in decoded for n in d.accepted_drafts]
    verified = [n for d in decoded for n in d.verified_drafts]
    shares = []
    for slot in range(1, block_size):
        could = sum(n >= slot for n in verified)
        shares.append(sum(n >= slot for n in accepted) / could if could else 0.0)
    return tuple(shares)


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """One token for each row of ``logits[T, V]``, int64 [T]."""
    if temperature == 0:
        return logits.argmax(-1)
    if not len(logits):
        return torch.empty(0, dtype=torch.long, device=logits.device)
    return torch.multinomial(_probabilities(logits, temperature), 1, generator=generator)[:, 0]


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide / temperature).softmax(-1)


def _until_end(tokens: list[int], eos_token_ids: Collection[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: index + 1]
    return tokens


def _timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """The result and the wall-clock seconds until the device has finished it."""
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start


def _check_request(prompt_ids: Sequence[int], max_new_tokens: int, temperature: float) -> None:
    if not len(prompt_ids):
        raise PayloadError("a prompt is empty", "give at least one token", kind="usage")
    if max_new_tokens < 1:
        raise PayloadError(f"max_new_tokens must be at least 1, not {max_new_tokens}", kind="usage")
    if not temperature >= 0:
        raise PayloadError(f"temperature must not be negative: {temperature}", kind="usage")
