"""Rows to token ids and loss masks; the mask of a chat is checked against the chat template, never assumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from payload.data.rows import Row
from payload.errors import PayloadError
from payload.places import place_or_hub_name
from payload.recipe import TargetSpec

_TOOL_FIELDS = ("tools", "functions")
_TOOL_ROLES = ("tool", "function")
_TOOL_CALLS = ("tool_calls", "function_call")
_REASONING = ("reasoning_content", "reasoning", "thinking")
ROW_FIELDS = ("messages", *_TOOL_FIELDS, "text", "input_ids", "loss_mask")
"""All of a row that encoding looks at."""
_TOOLS = "tools or tool calls, which are not supported"


@dataclass(frozen=True)
class Example:
    """Token ids of one document and, for each, whether it is supervised."""

    input_ids: list[int]
    loss_mask: list[bool]


class RowSkippedError(Exception):
    """A row that cannot be used; the text is the reason by which skips are counted."""


def load_tokenizer(spec: TargetSpec) -> Any:
    """The target's own tokenizer. Raises ``PayloadError`` when there is none."""
    from transformers import AutoTokenizer

    options = {"gguf_file": spec.gguf_file} if spec.gguf_file else {}
    try:
        return AutoTokenizer.from_pretrained(
            place_or_hub_name(spec.model), trust_remote_code=spec.trust_remote_code, **options
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise PayloadError(f"The tokenizer of {spec.model} cannot be loaded: {error}") from error


def encode_row(
    row: Row, tokenizer: Any, max_length: int, min_loss_tokens: int, notes: Counter[str]
) -> Example:
    """Turn ``{"messages": …}``, ``{"text": …}`` or ``{"input_ids": …[, "loss_mask": …]}`` into an example.

    Longer documents are cut at ``max_length``. What was cut or left unsupervised is counted in ``notes``.
    Raises ``RowSkippedError`` with the reason when nothing usable is left.
    """
    content = row.content
    if content is None:
        raise RowSkippedError("not a JSON object")
    if "messages" in content:
        turns = chat_turns(content)
        if any(turn.get(name) for turn in content["messages"] for name in _REASONING):
            # Without it the answer is one that the target gives at once, which is another.
            raise RowSkippedError("reasoning beside the content of a turn, which is not supported")
        example = encode_chat(turns, tokenizer, notes)
    else:
        example = _encode_plain(content, tokenizer)
    if len(example.input_ids) > max_length:
        notes["cut to the maximum length"] += 1
        example = Example(example.input_ids[:max_length], example.loss_mask[:max_length])
    if sum(example.loss_mask) < min_loss_tokens:
        raise RowSkippedError("too few supervised tokens")
    return example


def chat_turns(content: dict[str, Any]) -> list[dict[str, str]]:
    """The turns of a row's ``messages``: ``role`` and ``content`` of each, and nothing else.

    Raises ``RowSkippedError`` with the reason when they are not turns of text, or not all that the target would see.
    """
    if "messages" not in content:
        raise RowSkippedError("no messages")
    value = content["messages"]
    if any(content.get(name) for name in _TOOL_FIELDS):
        raise RowSkippedError(_TOOLS)
    if not isinstance(value, list) or not value:
        raise RowSkippedError("messages is not a list of turns")
    for turn in value:
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise RowSkippedError("a turn without a role")
        if turn["role"] in _TOOL_ROLES or any(turn.get(name) for name in _TOOL_CALLS):
            raise RowSkippedError(_TOOLS)
        if not isinstance(turn.get("content"), str):
            raise RowSkippedError("a turn whose content is not text")
    return [{"role": turn["role"], "content": turn["content"]} for turn in value]


def encode_chat(messages: list[dict[str, str]], tokenizer: Any, notes: Counter[str]) -> Example:
    """Render a conversation and supervise each assistant turn that the template renders as it was generated.

    A turn is supervised when the prompt before it (with the generation prompt) is a prefix of the conversation up to
    and including it, and that is a prefix of the whole. A template that rewrites earlier turns fails this for those
    turns, which are then left unsupervised and counted: the target never produced that text in that context.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise RowSkippedError("no assistant turn")
    whole = _render(tokenizer, messages, generation=False)
    mask = [False] * len(whole)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:index], generation=True)
        through = _render(tokenizer, messages[: index + 1], generation=False)
        if through[: len(prompt)] != prompt or whole[: len(through)] != through:
            notes["assistant turn left unsupervised: the template renders it differently later"] += 1
            continue
        end = _end_of_turn(through, len(prompt), tokenizer)
        mask[len(prompt) : end] = [True] * (end - len(prompt))
    if not any(mask):
        raise RowSkippedError("no assistant turn survives the chat template")
    return Example(whole, mask)


def encode_prompt(row: Row, tokenizer: Any, max_length: int) -> list[int]:
    """Token ids of what a row asks: of a chat what comes before its first answer, else the first half.

    They are at least one and fewer than ``max_length``. Raises ``RowSkippedError`` with the reason when there is no
    such prompt; a row that `encode_row` cannot read has none either.
    """
    content = row.content
    if content is None:
        raise RowSkippedError("not a JSON object")
    if "messages" in content:
        before = list(takewhile(lambda turn: turn["role"] != "assistant", chat_turns(content)))
        if not before:
            raise RowSkippedError("no turn before the first answer")
        prompt = render_prompt(before, tokenizer)
    else:
        ids = _encode_plain(content, tokenizer).input_ids
        prompt = ids[: len(ids) // 2]
    if not prompt:
        raise RowSkippedError("too short for a prompt")
    if len(prompt) >= max_length:
        raise RowSkippedError("prompt longer than the maximum length")
    return prompt


def render_prompt(messages: list[dict[str, str]], tokenizer: Any) -> list[int]:
    """Token ids of a conversation that ends where the assistant is to speak."""
    return _render(tokenizer, messages, generation=True)


def end_token_ids(tokenizer: Any, config: Any) -> set[int]:
    """Every token that ends an answer, by the tokenizer or ``config.eos_token_id``."""
    named = getattr(config, "eos_token_id", None)
    ends = [*named] if isinstance(named, list | tuple) else [named]
    return {int(token) for token in (*ends, tokenizer.eos_token_id) if token is not None}


def verify_template(tokenizer: Any) -> None:
    """Raise ``PayloadError`` unless the template's mask of a known answer is exactly that answer's tokens."""
    if not getattr(tokenizer, "chat_template", None):
        raise PayloadError(
            "The target's tokenizer has no chat template, but the data are chat messages.",
            hint="Give rows of text or token ids, or a target whose tokenizer has a template.",
            kind="refused",
        )
    _check_mask(tokenizer, [_PROBE[0]])
    try:
        _check_mask(tokenizer, _PROBE)
    except RowSkippedError:
        # Some templates know one turn only: longer conversations are then skipped one by one, and counted.
        return


_PROBE = (("How many days?", "It is seven, I think."), ("And how many nights?", "As many, of course."))


def _check_mask(tokenizer: Any, exchanges: Sequence[tuple[str, str]]) -> None:
    """Raise unless what is supervised of a conversation has its last answer and none of its questions."""
    turns = [
        {"role": role, "content": text}
        for exchange in exchanges
        for role, text in zip(("user", "assistant"), exchange, strict=True)
    ]
    try:
        example = encode_chat(turns, tokenizer, Counter())
    except RowSkippedError as error:
        if len(exchanges) > 1:
            raise
        raise PayloadError(
            f"The chat template cannot be used for training: {error}.", kind="refused"
        ) from error
    supervised = [token for token, kept in zip(example.input_ids, example.loss_mask, strict=True) if kept]
    text = tokenizer.decode(supervised, skip_special_tokens=False)
    answer = exchanges[-1][1]
    if answer not in text or any(question in text for question, _ in exchanges):
        raise PayloadError(
            f"The chat template supervises {text!r} where the answer is {answer!r}.",
            hint="The template rewrites the answer or renders a question after it; training on it would teach that.",
            kind="refused",
        )


def _render(tokenizer: Any, messages: list[dict[str, str]], generation: bool) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
    except Exception as error:
        raise RowSkippedError(f"the chat template refuses it: {_in_a_line(error)}") from error
    return _tokenized(tokenizer, text, add_special_tokens=False)


def _tokenized(tokenizer: Any, text: str, **options: Any) -> list[int]:
    try:
        ids: list[int] = tokenizer(text, **options)["input_ids"]
    except Exception as error:
        # Half a surrogate, which JSON can hold and no encoding.
        raise RowSkippedError(f"the tokenizer refuses it: {_in_a_line(error)}") from error
    return ids


def _in_a_line(error: Exception) -> str:
    """An error's text, which may quote the row, so that any log can hold it."""
    text = " ".join(str(error).split())[:200]
    return text.encode("utf-8", "backslashreplace").decode()


def _end_of_turn(ids: list[int], start: int, tokenizer: Any) -> int:
    """One past the last special token after ``start`` behind which a template adds nothing but white space.

    That token ends the turn, and what follows it is not generated. It need not be the tokenizer's end of text.
    """
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    for index in range(len(ids) - 1, start - 1, -1):
        if ids[index] in special or ids[index] == tokenizer.eos_token_id:
            return len(ids) if tokenizer.decode(ids[index + 1 :]).strip() else index + 1
    return len(ids)


def _encode_plain(content: dict[str, Any], tokenizer: Any) -> Example:
    if "text" in content:
        return _encode_text(content["text"], tokenizer)
    if "input_ids" in content:
        return _take_ids(content, len(tokenizer))
    raise RowSkippedError("no messages, text or input_ids")


def _encode_text(text: Any, tokenizer: Any) -> Example:
    if not isinstance(text, str) or not text.strip():
        raise RowSkippedError("text is empty or not text")
    ids = _tokenized(tokenizer, text)
    return Example(ids, [True] * len(ids))


def _take_ids(content: dict[str, Any], vocabulary: int) -> Example:
    ids, mask = content["input_ids"], content.get("loss_mask")
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocabulary for token in ids):
        raise RowSkippedError("input_ids outside the vocabulary")
    if mask is None:
        return Example(ids, [True] * len(ids))
    if not isinstance(mask, list) or len(mask) != len(ids):
        raise RowSkippedError("loss_mask of another length than input_ids")
    return Example(ids, [bool(kept) for kept in mask])
