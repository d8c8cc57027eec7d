"""Held-out accepted length by real speculative decoding, shared among the targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from payload.acceptance import Acceptance, combine, evaluate
from payload.data.rows import DEMO_ROWS, read_rows
from payload.data.tokens import RowSkippedError, encode_prompt, end_token_ids
from payload.drafter.model import DFlashDrafter
from payload.errors import PayloadError, ToldToStopError
from payload.recipe import Recipe
from payload.target import Target

PROMPTS_AT_ONCE = 16
"""How many prompts are decoded together, and between which a stop is looked for and progress told."""
_REASONS_TOLD = 10
"""The most frequent ones: a chat template may have words of its own for each row."""


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


def held_out_prompts(
    recipe: Recipe,
    tokenizer: Any,
    generation_config: Any,
    note: Callable[[str], None] = lambda line: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> HeldOut:
    """The first ``data.eval_rows`` usable prompts of ``data.eval`` (`encode_prompt`); no row after them is read.

    ``generation_config`` is the target's, and knows what ends its answers. ``note`` gets a line for each reason by
    which rows were skipped. Raises ``PayloadError`` when there is no prompt, and once ``should_stop`` says so.
    """
    data, prompts, skipped = recipe.data, list[tuple[int, ...]](), Counter[str]()
    rows = read_rows(data.eval, "eval", None, recipe.train.seed, max(DEMO_ROWS, data.eval_rows))
    while len(prompts) < data.eval_rows and (row := next(rows, None)) is not None:
        if should_stop():
            raise ToldToStopError("Told to stop while the held-out rows were being read.")
        try:
            prompts.append(tuple(encode_prompt(row, tokenizer, data.max_length)))
        except RowSkippedError as error:
            skipped[str(error)] += 1
    if data.eval and not prompts:
        reasons = "; ".join(f"{count} rows: {reason}" for reason, count in skipped.most_common(_REASONS_TOLD))
        raise PayloadError(
            f"None of {skipped.total()} held-out rows has a prompt.",
            hint=f"Why: {reasons}." if reasons else "The sources of data.eval hold no rows.",
        )
    for reason, count in skipped.most_common(_REASONS_TOLD):
        note(f"data: {count} held-out rows skipped: {reason}")
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
