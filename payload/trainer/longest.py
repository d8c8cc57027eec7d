"""How long a recipe's prompts get, without encoding all of them."""

from __future__ import annotations

from heapq import nlargest
from typing import Any

from payload.data.rows import Row, read_rows
from payload.data.tokens import RowSkippedError, chat_turns, load_tokenizer, render_prompt
from payload.estimate_terms import PromptTokens
from payload.recipe import Recipe
from payload.trainer.heldout import held_out_prompts

_ENCODED = 64
"""Of the rows with the most characters, so many are encoded to find the one with the most tokens."""


def longest_prompts(recipe: Recipe) -> PromptTokens:
    """Tokens of the longest prompts that the target is to answer, and of the held-out ones.

    Raises ``PayloadError`` when the rows or the tokenizer cannot be read.
    """
    tokenizer = load_tokenizer(recipe.target)
    data, train, held_out = recipe.data, None, None
    if data.regenerate:
        rows = read_rows(data.train, "train", data.train_rows, recipe.train.seed)
        likely = nlargest(_ENCODED, map(_turns, rows), key=lambda turns: sum(map(len, turns)))
        lengths = [_length(turns, tokenizer) for turns in likely]
        train = max((length for length in lengths if 0 < length < data.max_length), default=None)
    if data.eval:
        held_out = max(map(len, held_out_prompts(recipe, tokenizer, None).prompts))
    return PromptTokens(train, held_out)


def _turns(row: Row) -> list[str]:
    """Role and text of each turn up to the last question, one after the other; empty where there is none."""
    try:
        turns = chat_turns(row.content or {})
    except RowSkippedError:
        return []
    while turns and turns[-1]["role"] != "user":
        turns.pop()
    return [turn[part] for turn in turns for part in ("role", "content")]


def _length(turns: list[str], tokenizer: Any) -> int:
    messages = [{"role": role, "content": text} for role, text in zip(turns[::2], turns[1::2], strict=True)]
    try:
        return len(render_prompt(messages, tokenizer)) if messages else 0
    except RowSkippedError:
        return 0
