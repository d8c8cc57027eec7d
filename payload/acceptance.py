"""How much speculative decoding gains: accepted length, speed, and whether the text is the target's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from payload.decode import Decoded, plain_decode, speculative_decode
from payload.decode_rows import plain_decode_rows, speculative_decode_rows
from payload.drafter.model import DFlashDrafter
from payload.errors import PayloadError
from payload.target import Target

T = TypeVar("T")
Prompts = Sequence[Sequence[int]]

_WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Acceptance:
    """What `evaluate` measured over all prompts.

    ``mean_accepted_length``: tokens gained a target forward. ``by_position[k - 1]``: of the forwards that
    could accept slot k, the share that accepted slots 1 .. k. ``speedup``: tokens a second by wall clock,
    prompts included, over those of plain decoding in the same run, of as many prompts at once; ``identical``:
    prompts whose text equals plain decoding's token for token, expected of all when greedy in exact
    arithmetic. Both ``None`` if plain decoding was not run, ``identical`` also when sampling.
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


def evaluate(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Prompts,
    max_new_tokens: int,
    temperature: float = 0.0,
    *,
    eos_token_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
    compare_plain: bool = True,
    at_once: int = 1,
) -> Acceptance:
    """Decodes every prompt (token ids) and reports acceptance, and speed and text against plain decoding.

    ``at_once`` prompts are decoded together when greedy, and one by one when sampling. Raises PayloadError (kind
    "usage") without prompts.
    """
    if not prompts:
        raise PayloadError("there are no prompts to evaluate on", "give held-out rows", kind="usage")

    together = at_once > 1 and temperature == 0
    alone: dict[str, Any] = {"eos_token_ids": eos_token_ids, "generator": generator}

    def speculative(some: Prompts, limit: int) -> list[Decoded]:
        if together:
            return speculative_decode_rows(target, drafter, some, limit, eos_token_ids)
        return [speculative_decode(target, drafter, one, limit, temperature, **alone) for one in some]

    def plain(some: Prompts, limit: int) -> list[list[int]]:
        if together:
            return plain_decode_rows(target, some, limit, eos_token_ids)
        return [plain_decode(target, one, limit, temperature, **alone) for one in some]

    groups = _groups(prompts, at_once)
    if compare_plain:
        # Kernels are loaded and chosen outside the measured time.
        speculative(groups[0], min(max_new_tokens, _WARM_UP_ROUNDS * drafter.config.block_size))
        plain(groups[0], min(max_new_tokens, _WARM_UP_ROUNDS))
    decoded, seconds = _timed(
        lambda: _joined(speculative(some, max_new_tokens) for some in groups), target.device
    )
    tokens = sum(len(d.tokens) for d in decoded)
    plain_seconds = speedup = identical = None
    if compare_plain:
        texts, plain_seconds = _timed(
            lambda: _joined(plain(some, max_new_tokens) for some in groups), target.device
        )
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


def _groups(prompts: Prompts, at_once: int) -> list[Prompts]:
    """Prompts of like length together, ``at_once`` in a group."""
    ordered = sorted(prompts, key=len)
    return [ordered[start : start + at_once] for start in range(0, len(ordered), at_once)]


def _joined(groups: Iterable[list[T]]) -> list[T]:
    return [item for group in groups for item in group]


def _by_position(decoded: Sequence[Decoded], block_size: int) -> tuple[float, ...]:
    accepted = [n for d in decoded for n in d.accepted_drafts]
    verified = [n for d in decoded for n in d.verified_drafts]
    shares = []
    for slot in range(1, block_size):
        could = sum(n >= slot for n in verified)
        shares.append(sum(n >= slot for n in accepted) / could if could else 0.0)
    return tuple(shares)


def _timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """The result and the wall-clock seconds until the device has finished it."""
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start
