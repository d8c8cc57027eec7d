"""The target answers the prompts itself, so that the drafter learns the text that the target really writes.

Answers go to a JSONL file, one line a conversation, keyed by a hash of its prompts. A run that was interrupted
continues where it stopped; a last line that was cut off is dropped. Lines hold the very token ids that were
generated, which tokenizing the text again would not always give.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from payload.data.rows import Row
from payload.data.tokens import RowSkippedError, end_token_ids, render_prompt
from payload.errors import PayloadError


@dataclass(frozen=True)
class GenerationSettings:
    """How the target answers; ``temperature`` 0 is greedy. A batch of prompts and ``seed`` decide what is sampled."""

    batch_size: int = 64
    max_new_tokens: int = 1024
    max_length: int = 3072
    temperature: float = 0.0
    seed: int = 0


@dataclass
class _Conversation:
    key: str
    turns: list[dict[str, str]]
    """What is said besides the answers, in order; an answer follows each user turn."""
    messages: list[dict[str, str]] = field(default_factory=list)
    spans: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Prompt ids and answer ids of each answer so far."""
    cut: bool = False

    def to_next_prompt(self) -> bool:
        """Move the turns up to the next user turn into the messages; false when nothing is left to answer."""
        while self.turns and not self.cut:
            turn = self.turns.pop(0)
            self.messages.append(turn)
            if turn["role"] == "user":
                return True
        return False


def regenerate(
    rows: Iterable[Row],
    model: Any,
    tokenizer: Any,
    destination: Path,
    settings: GenerationSettings,
    report: Callable[[str], None] = lambda line: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Counter[str]:
    """Append to ``destination`` an answered row for each conversation that is not there yet.

    ``model`` is a transformers causal LM with ``generate``. A line has ``input_ids`` and ``loss_mask`` (true on the
    answers), ``messages`` under ``conversation`` for people, and the ``key``. Returns counts: answered, kept from
    before, and rows skipped by reason. Raises ``PayloadError`` when no row could be answered, and at the next token
    once ``should_stop`` says so.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    done = _keys_of_complete_lines(destination)
    counts: Counter[str] = Counter()
    pending = _conversations(rows, done, counts)
    with destination.open("ab") as file:
        while chunk := list(islice(pending, settings.batch_size)):
            for conversation in _answer(chunk, model, tokenizer, settings, counts, should_stop):
                file.write(json.dumps(_line(conversation)).encode() + b"\n")
                counts["answered"] += 1
            file.flush()
            os.fsync(file.fileno())
            report(f"regenerate: {counts['answered']} answered, {counts['kept']} kept from before")
    if not counts["answered"] and not counts["kept"]:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in counts.items())
        raise PayloadError("No prompt could be answered by the target.", hint=f"Why: {reasons or 'no rows'}.")
    return counts


def _conversations(rows: Iterable[Row], done: set[str], counts: Counter[str]) -> Iterator[_Conversation]:
    for row in rows:
        messages = (row.content or {}).get("messages")
        if not isinstance(messages, list) or not all(
            isinstance(turn, dict)
            and isinstance(turn.get("role"), str)
            and isinstance(turn.get("content"), str)
            for turn in messages
        ):
            counts["skipped: no messages"] += 1
            continue
        said = [
            {"role": turn["role"], "content": turn["content"]}
            for turn in messages
            if turn["role"] != "assistant"
        ]
        if not any(turn["role"] == "user" for turn in said):
            counts["skipped: no user turn"] += 1
            continue
        key = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        if key in done:
            counts["kept"] += 1
            continue
        done.add(key)
        yield _Conversation(key, said)


def _answer(
    conversations: list[_Conversation],
    model: Any,
    tokenizer: Any,
    settings: GenerationSettings,
    counts: Counter[str],
    should_stop: Callable[[], bool],
) -> list[_Conversation]:
    """Answer every user turn of the conversations, one round of turns after the other."""
    while open_ones := [conversation for conversation in conversations if conversation.to_next_prompt()]:
        prompts: list[list[int]] = []
        asked: list[_Conversation] = []
        for conversation in open_ones:
            try:
                prompt = render_prompt(conversation.messages, tokenizer)
            except RowSkippedError as error:
                counts[f"skipped: {error}"] += 1
                conversation.cut = True
                continue
            if len(prompt) >= settings.max_length:
                counts["skipped: prompt longer than the maximum length"] += 1
                conversation.cut = True
                continue
            prompts.append(prompt)
            asked.append(conversation)
        if not asked:
            break
        answers = generate_answers(model, prompts, tokenizer, settings, should_stop)
        if should_stop():
            raise PayloadError("Told to stop while answers were being generated; those so far are kept.")
        for conversation, prompt, answer in zip(asked, prompts, answers, strict=True):
            conversation.spans.append((prompt, answer))
            text = tokenizer.decode(answer, skip_special_tokens=True)
            conversation.messages.append({"role": "assistant", "content": text})
            conversation.cut = not answer or answer[-1] not in _end_tokens(model, tokenizer)
    return [conversation for conversation in conversations if conversation.spans]


def generate_answers(
    model: Any,
    prompts: list[list[int]],
    tokenizer: Any,
    settings: GenerationSettings,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """The target's continuation of each prompt, end token included where it was reached.

    Once ``should_stop`` says so, what there is after the next token.
    """
    ends = _end_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends)
    width = max(map(len, prompts))
    device = next(model.parameters()).device
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    seen = torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device
    )
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if settings.temperature > 0:
        sampling = {"do_sample": True, "temperature": settings.temperature, "top_p": 1.0, "top_k": 0}
    with torch.no_grad(), _seeded(settings.seed, prompts, device):
        whole = model.generate(
            input_ids=ids,
            attention_mask=seen,
            max_new_tokens=settings.max_new_tokens,
            pad_token_id=pad,
            eos_token_id=sorted(ends),
            stopping_criteria=[
                lambda ids, scores: ids.new_full(ids.shape[:1], should_stop(), dtype=torch.bool)
            ],
            **sampling,
        )
    return [_until_end(row[width:].tolist(), ends) for row in whole]


@contextmanager
def _seeded(seed: int, prompts: list[list[int]], device: torch.device) -> Iterator[None]:
    """Random numbers of their own for these prompts, whatever was drawn before."""
    digest = hashlib.sha256(json.dumps([seed, prompts]).encode()).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        yield


def _until_end(answer: list[int], ends: set[int]) -> list[int]:
    for index, token in enumerate(answer):
        if token in ends:
            return answer[: index + 1]
    return answer


def _end_tokens(model: Any, tokenizer: Any) -> set[int]:
    ends = end_token_ids(tokenizer, model.generation_config)
    if not ends:
        raise PayloadError("The target names no end-of-text token.", hint="Set eos_token_id in its config.")
    return ends


def _line(conversation: _Conversation) -> dict[str, Any]:
    prompt, answer = conversation.spans[-1]
    ids = prompt + answer
    mask = [False] * len(ids)
    for earlier_prompt, earlier_answer in conversation.spans:
        start, end = len(earlier_prompt), len(earlier_prompt) + len(earlier_answer)
        # A template that rewrites earlier turns renders them unlike what was generated: those stay unsupervised.
        if ids[:end] == earlier_prompt + earlier_answer:
            mask[start:end] = [True] * (end - start)
    return {
        "key": conversation.key,
        "input_ids": ids,
        "loss_mask": mask,
        "conversation": conversation.messages,
    }


def _keys_of_complete_lines(path: Path) -> set[str]:
    """Keys of the lines already there; what follows the last complete line is cut off."""
    if not path.exists():
        return set()
    keys: set[str] = set()
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                keys.add(json.loads(line)["key"])
            except (ValueError, KeyError, TypeError) as error:
                raise PayloadError(
                    f"{path} is damaged at byte {end}.", hint="Delete the file to generate the answers anew."
                ) from error
            end += len(line)
    os.truncate(path, end)
    return keys
