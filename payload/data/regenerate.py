"""The target answers the prompts itself, so that the drafter learns the text that the target really writes.

The answers of a conversation are a line of the answers' files (`payload.data.answers`), keyed by a hash of what was
asked. Lines hold the very token ids that were generated, which tokenizing the text again would not always give.

The unit of work is a batch of prompts: the same ones stand together however many ranks share the batches out and
whatever was answered before, so that neither changes an answer. A run that was interrupted continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

from payload.data.answers import answered_keys, appending
from payload.data.generation import GenerationSettings, generate_answers
from payload.data.rows import Row
from payload.data.tokens import RowSkippedError, chat_turns, end_token_ids, render_prompt
from payload.errors import PayloadError, ToldToStopError
from payload.target import Target

_SKIPPED = "skipped: "


class Share:
    """This rank's part of the work; here all of it."""

    part = 0
    """Which of the answers' files is this rank's."""

    def __init__(self) -> None:
        self._numbers = count()
        self._totals: Counter[str] = Counter()

    def claim(self) -> int:
        """The number of a batch that no rank has claimed yet, greater than those claimed here before."""
        return next(self._numbers)

    def add(self, counts: Counter[str]) -> Counter[str]:
        """Take in what this rank has done since the last time; returns what all ranks have done."""
        self._totals += counts
        return self._totals


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
    target: Target,
    tokenizer: Any,
    destination: Path,
    settings: GenerationSettings,
    report: Callable[[str], None] = lambda line: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Counter[str]:
    """`answer_share` of all batches. Raises ``PayloadError`` also when there is no answer in the end."""
    counts = answer_share(rows, target, tokenizer, destination, settings, Share(), report, should_stop)
    require_answers(counts)
    return counts


def answer_share(
    rows: Iterable[Row],
    target: Target,
    tokenizer: Any,
    destination: Path,
    settings: GenerationSettings,
    share: Share,
    report: Callable[[str], None] = lambda line: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Counter[str]:
    """Append to the answers of ``destination`` a row for each conversation of this share that is not there yet.

    A row has ``input_ids`` and ``loss_mask`` (true on the answers), ``messages`` under ``conversation`` for people, and
    the ``key``. Answers that the last prompt does not hold as they were generated are in further rows of ``input_ids``
    and ``loss_mask``, under ``earlier``. Returns counts: answered, kept from before, and rows skipped by reason. Raises
    ``PayloadError`` a few tokens after ``should_stop`` says so, and when the answers' files cannot be used.
    """
    done = answered_keys(destination)
    unusable: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    mine = share.claim()
    with appending(destination, share.part) as append:
        for number, batch in enumerate(_batches(_conversations(rows, unusable), settings.batch_size)):
            if number < mine:
                continue
            of_batch: Counter[str] = Counter(kept=sum(one.key in done for one in batch))
            if _something_to_ask(batch, done, tokenizer, settings, of_batch):
                answered = _answer(batch, target, tokenizer, settings, of_batch, should_stop)
                new = [_line(one) for one in answered if one.key not in done]
                append(new)
                of_batch["answered"] = len(new)
            counts += of_batch
            total = share.add(of_batch)
            if of_batch["answered"]:
                report(progress(total))
            mine = share.claim()
    # Every rank reads all rows, but each counts once.
    return counts + unusable if share.part == 0 else counts


def progress(counts: Counter[str]) -> str:
    """How far the answers are, in words."""
    return f"regenerate: {counts['answered']} answered, {counts['kept']} kept from before"


def skips(counts: Counter[str]) -> list[str]:
    """What was not answered, a line for each reason."""
    reasons = {reason: number for reason, number in counts.items() if reason.startswith(_SKIPPED) and number}
    return [f"regenerate: {number} {reason}" for reason, number in sorted(reasons.items())]


def require_answers(counts: Counter[str]) -> None:
    """Raises ``PayloadError``, with the reasons, when no row was answered, now or before."""
    if not counts["answered"] and not counts["kept"]:
        reasons = "; ".join(f"{number}: {reason}" for reason, number in counts.items() if number)
        raise PayloadError(
            "No prompt could be answered by the target.",
            f"Why: {reasons or 'no rows'}. Rows of text or input_ids are learned from with data.regenerate=false.",
        )


def prompt_keys(rows: Iterable[Row]) -> Iterator[str]:
    """The keys of the rows' conversations, in their order, each once."""
    return (conversation.key for conversation in _conversations(rows, Counter()))


def _batches(conversations: Iterator[_Conversation], size: int) -> Iterator[list[_Conversation]]:
    while batch := list(islice(conversations, size)):
        yield batch


def _conversations(rows: Iterable[Row], counts: Counter[str]) -> Iterator[_Conversation]:
    seen: set[str] = set()
    for row in rows:
        try:
            turns = chat_turns(row.content or {})
        except RowSkippedError as error:
            counts[f"{_SKIPPED}{error}"] += 1
            continue
        said = [turn for turn in turns if turn["role"] != "assistant"]
        if not any(turn["role"] == "user" for turn in said):
            counts[f"{_SKIPPED}no user turn"] += 1
            continue
        key = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        if key in seen:
            counts[f"{_SKIPPED}it repeats an earlier prompt"] += 1
            continue
        seen.add(key)
        yield _Conversation(key, said)


def _something_to_ask(
    batch: list[_Conversation],
    done: set[str],
    tokenizer: Any,
    settings: GenerationSettings,
    counts: Counter[str],
) -> bool:
    """Whether a conversation has no answer and can have one; of a batch without any, why goes into ``counts``.

    A batch that was cut short is answered again as a whole, since who stands together decides what is sampled.
    """
    missing = [one for one in batch if one.key not in done]
    if len(missing) == len(batch):
        return True
    reasons: Counter[str] = Counter()
    for one in missing:
        first = _Conversation(one.key, list(one.turns))
        first.to_next_prompt()
        if _prompt(first, tokenizer, settings, reasons) is not None:
            return True
    counts.update(reasons)
    return False


def _prompt(
    conversation: _Conversation, tokenizer: Any, settings: GenerationSettings, counts: Counter[str]
) -> list[int] | None:
    """Token ids of what the target is to answer next; None when it cannot, counted by its reason."""
    try:
        prompt = render_prompt(conversation.messages, tokenizer)
    except RowSkippedError as error:
        counts[f"{_SKIPPED}{error}"] += 1
        return None
    if len(prompt) >= settings.max_length:
        counts[f"{_SKIPPED}prompt longer than the maximum length"] += 1
        return None
    return prompt


def _answer(
    conversations: list[_Conversation],
    target: Target,
    tokenizer: Any,
    settings: GenerationSettings,
    counts: Counter[str],
    should_stop: Callable[[], bool],
) -> list[_Conversation]:
    """Answer every user turn of the conversations, one round of turns after the other."""
    ends = _end_tokens(target, tokenizer)
    while open_ones := [conversation for conversation in conversations if conversation.to_next_prompt()]:
        asked: list[tuple[_Conversation, list[int]]] = []
        for conversation in open_ones:
            prompt = _prompt(conversation, tokenizer, settings, counts)
            conversation.cut = prompt is None
            if prompt is not None:
                asked.append((conversation, prompt))
        if not asked:
            break
        answers = generate_answers(target, [prompt for _, prompt in asked], ends, settings, should_stop)
        if should_stop():
            raise ToldToStopError("Told to stop while answers were being generated; those so far are kept.")
        for (conversation, prompt), answer in zip(asked, answers, strict=True):
            conversation.spans.append((prompt, answer))
            text = tokenizer.decode(answer, skip_special_tokens=True)
            conversation.messages.append({"role": "assistant", "content": text})
            conversation.cut = answer[-1] not in ends
    return [conversation for conversation in conversations if conversation.spans]


def _end_tokens(target: Target, tokenizer: Any) -> set[int]:
    ends = end_token_ids(tokenizer, target.model.generation_config)
    if not ends:
        raise PayloadError("The target names no end-of-text token.", hint="Set eos_token_id in its config.")
    return ends


def _line(conversation: _Conversation) -> dict[str, Any]:
    *earlier, last = _documents(conversation.spans)
    line = {"key": conversation.key, **last, "conversation": conversation.messages}
    return {**line, "earlier": earlier} if earlier else line


def _documents(spans: list[tuple[list[int], list[int]]]) -> list[dict[str, Any]]:
    """``input_ids`` and ``loss_mask`` of as few documents as have each answer behind the very tokens it followed.

    A template that rewrites earlier turns, as by taking their thinking out, renders them unlike what was generated:
    what was asked and answered until then is a document of its own, before the last. Each answer is supervised once,
    in the last document that has it.
    """
    documents: list[dict[str, Any]] = []
    left = list(spans)
    while left:
        prompt, answer = left[-1]
        ids = prompt + answer
        mask = [False] * len(ids)
        others = []
        for before, said in left:
            start, end = len(before), len(before) + len(said)
            if ids[:end] == before + said:
                mask[start:end] = [True] * (end - start)
            else:
                others.append((before, said))
        documents.insert(0, {"input_ids": ids, "loss_mask": mask})
        left = others
    return documents
