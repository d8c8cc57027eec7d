"""Held-out accepted length by real speculative decoding, shared among the targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from payload.acceptance import Acceptance, combine, evaluate
from payload.data.rows import read_rows
from payload.data.tokens import end_token_ids, render_prompt
from payload.drafter.model import DFlashDrafter
from payload.errors import PayloadError
from payload.recipe import Recipe
from payload.target import Target

PROMPTS_AT_ONCE = 16
"""How many prompts are decoded together, and between which a stop is looked for and progress told."""


@dataclass(frozen=True)
class HeldOut:
    """Prompts as token ids, and what ends an answer."""

    prompts: tuple[tuple[int, ...], ...]
    eos_token_ids: frozenset[int]


class Sampling(NamedTuple):
    """Temperature 0 is greedy; the generator lives on the target's device."""

    temperature: float
    generator: torch.Generator | None


GREEDY = Sampling(0.0, None)


def held_out_prompts(recipe: Recipe, tokenizer: Any, generation_config: Any) -> HeldOut:
    """The first ``data.eval_rows`` usable prompts of ``data.eval``: what comes before the first answer of a chat, and
    the first half of a text. ``generation_config`` is the target's, and knows what ends its answers. Raises
    ``PayloadError`` when there is no prompt."""
    prompts: list[tuple[int, ...]] = []
    for row in read_rows(recipe.data.eval, "eval", recipe.data.eval_rows, recipe.train.seed):
        ids = _prompt_of(row.content or {}, tokenizer)
        if 0 < len(ids) < recipe.data.max_length:
            prompts.append(tuple(ids))
    if recipe.data.eval and not prompts:
        raise PayloadError("None of the held-out rows has a prompt.", hint="Check data.eval of the recipe.")
    return HeldOut(tuple(prompts), frozenset(end_token_ids(tokenizer, generation_config)))


def measure(
    target: Target,
    drafter: DFlashDrafter,
    held_out: HeldOut,
    max_new_tokens: int,
    group: dist.ProcessGroup | None = None,
    compare_plain: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    sampling: Sampling = GREEDY,
    at_once: int = PROMPTS_AT_ONCE,
) -> Acceptance | None:
    """Decode the prompts, each member of ``group`` its share, and give every member the same summary.

    ``drafter`` has the target's device and type. Once ``should_stop`` says so on any member, no further prompts are
    begun there and the result is None: the prompts that were decoded are not a fair sample. ``on_progress`` gets this
    member's prompts done, and all of its share. ``at_once`` prompts, at most ``PROMPTS_AT_ONCE``, are decoded
    together. A collective of ``group`` (the targets).
    """
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    # In order of their lengths, so that every member has its share of the long ones.
    share = sorted(held_out.prompts, key=len)[rank::size]
    parts: list[Acceptance] = []
    for start in range(0, len(share), PROMPTS_AT_ONCE):
        if should_stop():
            break
        on_progress(start, len(share))
        some = share[start : start + PROMPTS_AT_ONCE]
        parts.append(
            evaluate(
                target,
                drafter,
                some,
                max_new_tokens,
                sampling.temperature,
                eos_token_ids=held_out.eos_token_ids,
                generator=sampling.generator,
                compare_plain=compare_plain,
                at_once=at_once,
            )
        )
    if group is not None:
        gathered: list[list[Acceptance]] = [[] for _ in range(size)]
        dist.all_gather_object(gathered, parts, group=group)
        parts = [part for of_rank in gathered for part in of_rank]
    if sum(part.prompts for part in parts) < len(held_out.prompts):
        return None
    return combine(parts)


def _prompt_of(content: dict[str, Any], tokenizer: Any) -> list[int]:
    messages = content.get("messages")
    if isinstance(messages, list):
        before = []
        for turn in messages:
            if not isinstance(turn, dict) or turn.get("role") == "assistant":
                break
            before.append({"role": str(turn.get("role")), "content": str(turn.get("content"))})
        return render_prompt(before, tokenizer) if before else []
    if isinstance(content.get("text"), str):
        ids: list[int] = tokenizer(content["text"])["input_ids"]
        return ids[: len(ids) // 2]
    ids = content.get("input_ids") or []
    return ids[: len(ids) // 2] if all(type(token) is int for token in ids) else []
