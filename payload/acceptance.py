"""How much speculative decoding gains: accepted length, speed, and whether the text is the target's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
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
    """What `evaluate` counted over all prompts; the ratios are properties, so that parts add up exactly.

    ``gained``: tokens that came from the ``target_forwards`` after the prompts' own. ``accepted[k - 1]`` of the
    ``could_accept[k - 1]`` forwards that could accept slot k accepted slots 1 .. k. ``plain_tokens`` in
    ``plain_seconds`` came from plain decoding in the same run, of as many prompts at once; ``identical``: prompts
    whose text equals plain decoding's token for token, expected of all when greedy in exact arithmetic. These are
    ``None`` if plain decoding was not run, ``identical`` also when sampling.
    """

    prompts: int
    tokens: int
    target_forwards: int
    gained: int
    accepted: tuple[int, ...]
    could_accept: tuple[int, ...]
    seconds: float
    plain_tokens: int | None = None
    plain_seconds: float | None = None
    identical: int | None = None

    @property
    def mean_accepted_length(self) -> float:
        """Tokens gained a target forward; 0 without any."""
        return self.gained / max(1, self.target_forwards)

    @property
    def by_position(self) -> tuple[float, ...]:
        """The share that accepted slots 1 .. k of the forwards that could, for each k."""
        return tuple(n / max(1, of) for n, of in zip(self.accepted, self.could_accept, strict=True))

    @property
    def speedup(self) -> float | None:
        """Tokens a second by wall clock, prompts included, over those of plain decoding."""
        if self.plain_tokens is None or self.plain_seconds is None:
            return None
        return (self.tokens / self.seconds) / (self.plain_tokens / self.plain_seconds)


def combine(parts: Sequence[Acceptance]) -> Acceptance:
    """The summary of all the prompts of at least one part together. Seconds add up."""

    def total(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], tuple):
            return tuple(map(sum, zip(*values, strict=True)))
        return None if None in values else sum(values)

    return Acceptance(**{field.name: total(field.name) for field in fields(Acceptance)})


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
    texts, plain_seconds = None, None
    if compare_plain:
        texts, plain_seconds = _timed(
            lambda: _joined(plain(some, max_new_tokens) for some in groups), target.device
        )
    same = [one.tokens == text for one, text in zip(decoded, texts or [], strict=False)]
    lengths = [length for one in decoded for length in one.accepted_lengths]
    slots = range(1, drafter.config.block_size)
    return Acceptance(
        prompts=len(prompts),
        tokens=sum(len(one.tokens) for one in decoded),
        target_forwards=len(lengths),
        gained=sum(lengths),
        accepted=tuple(sum(n >= slot for one in decoded for n in one.accepted_drafts) for slot in slots),
        could_accept=tuple(sum(n >= slot for one in decoded for n in one.verified_drafts) for slot in slots),
        seconds=seconds,
        plain_tokens=None if texts is None else sum(map(len, texts)),
        plain_seconds=plain_seconds,
        identical=sum(same) if texts is not None and temperature == 0 else None,
    )


def _groups(prompts: Prompts, at_once: int) -> list[Prompts]:
    """Prompts of like length together, ``at_once`` in a group."""
    ordered = sorted(prompts, key=len)
    return [ordered[start : start + at_once] for start in range(0, len(ordered), at_once)]


def _joined(groups: Iterable[list[T]]) -> list[T]:
    return [item for group in groups for item in group]


def _timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """The result and the wall-clock seconds until the device has finished it."""
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start
