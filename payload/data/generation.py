"""The target's own continuations of many prompts at once, token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from payload.decode import choose
from payload.row_cache import RowCache
from payload.seeds import seed_of
from payload.target import Target

_STEPS_BETWEEN_LOOKS = 8
"""The host looks at the tokens so often: each look waits for the device."""
_DROP_SHARE = 8
"""Ended rows are dropped once they are one of so many: dropping copies the caches of those that go on."""


@dataclass(frozen=True)
class GenerationSettings:
    """How the target answers; ``temperature`` 0 is greedy. A batch of prompts and ``seed`` decide what is sampled.

    Prompt and answer together have at most ``max_length`` tokens, which is what a row of training data can hold.
    """

    batch_size: int = 64
    max_new_tokens: int = 1024
    max_length: int = 3072
    temperature: float = 0.0
    seed: int = 0


@torch.no_grad()
def generate_answers(
    target: Target,
    prompts: list[list[int]],
    end_tokens: Collection[int],
    settings: GenerationSettings,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """The target's continuation of each prompt shorter than ``max_length``, end token included where it was reached.

    Greedy, each is what `plain_decode` gives it alone. Rows that have ended are dropped while the others go on. Once
    ``should_stop`` says so, what there is within a few tokens.
    """
    device, lengths = target.device, [len(prompt) for prompt in prompts]
    generator = _generator(settings.seed, prompts, device)
    ends = torch.tensor(sorted(end_tokens), dtype=torch.long, device=device)
    rooms = [min(settings.max_new_tokens, settings.max_length - length) for length in lengths]
    room = torch.tensor(rooms, device=device)
    # A row that has ended goes on unread until it is dropped, at most as long as the longest answer.
    cache = RowCache(len(target.model.model.layers), len(prompts), max(lengths) + max(rooms), device)
    ids = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts], device=device)
    logits = target.step_rows(ids, cache, logits_at=torch.tensor(lengths, device=device) - 1).logits[:, 0]
    cache.advance(lengths)
    answers = ids.new_zeros(len(prompts), max(rooms))
    rows = torch.arange(len(prompts), device=device)
    over = torch.zeros_like(rows, dtype=torch.bool)
    for length in range(1, max(rooms) + 1):
        newest = choose(logits, settings.temperature, generator)
        answers[rows, length - 1] = newest
        over |= torch.isin(newest, ends) | (room[rows] <= length)
        if length % _STEPS_BETWEEN_LOOKS == 0 or length == max(rooms):
            going = (~over).nonzero()[:, 0]
            if not len(going) or should_stop():
                break
            if (len(rows) - len(going)) * _DROP_SHARE >= len(rows):
                cache.keep(going.tolist())
                newest, rows, over = newest[going], rows[going], over[going]
        logits = target.step_rows(newest[:, None], cache).logits[:, 0]
        cache.advance(1)
    written = answers[:, :length].tolist()
    return [_ended(answer[:most], end_tokens) for answer, most in zip(written, rooms, strict=True)]


def _ended(answer: list[int], end_tokens: Collection[int]) -> list[int]:
    """The answer up to its first end token."""
    for index, token in enumerate(answer):
        if token in end_tokens:
            return answer[: index + 1]
    return answer


def _generator(seed: int, prompts: list[list[int]], device: torch.device) -> torch.Generator:
    """Random numbers of their own for these prompts, whatever was drawn before."""
    return torch.Generator(device).manual_seed(seed_of(seed, prompts))
