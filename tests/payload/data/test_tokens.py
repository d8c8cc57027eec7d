from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import (
    booleans,
    characters,
    dictionaries,
    fixed_dictionaries,
    floats,
    integers,
    lists,
    none,
    recursive,
    sampled_from,
    text,
)

from payload.data.encoding import encode_rows
from payload.data.rows import Row
from payload.data.tokens import (
    Example,
    RowSkippedError,
    chat_turns,
    encode_prompt,
    encode_row,
    verify_template,
)
from payload.errors import PayloadError

QUESTION = {"role": "user", "content": "How many?"}
ANSWER = {"role": "assistant", "content": "Seven apples."}
SECOND = {"role": "user", "content": "And now?"}
LAST = {"role": "assistant", "content": "Nine."}

REWRITES_HISTORY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>' }}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNLIKE_ITS_PROMPT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>robot says{% endif %}"
)
DROPS_THE_ANSWER = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% else %}"
    "<|im_end|>{% endif %}{% endfor %}"
)


ENDS_TURNS_OTHERWISE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|mask|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_END_OF_TURN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
QUESTIONS_LAST = (
    "{% for m in messages if m.role == 'assistant' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% for m in messages if m.role == 'user' and not loop.first %}{{ m.content }}<|im_end|>{% endfor %}"
)
ONE_TURN_ONLY = (
    "{% if messages | length > 2 %}{{ raise_exception('one question only') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encode(content: Any, words: Any, **changes: Any) -> tuple[Example, Counter[str]]:
    notes: Counter[str] = Counter()
    limits = {"max_length": 256, "min_loss_tokens": 1} | changes
    return encode_row(Row(content, "here"), words, notes=notes, **limits), notes


def supervised(example: Example, words: Any) -> str:
    kept = [token for token, on in zip(example.input_ids, example.loss_mask, strict=True) if on]
    return str(words.decode(kept))


def with_template(words: Any, template: str) -> Any:
    changed = copy.deepcopy(words)
    changed.chat_template = template
    return changed


def test_every_answer_is_supervised_up_to_its_end_token_and_nothing_else(words: Any) -> None:
    example, notes = encode({"messages": [QUESTION, ANSWER, SECOND, LAST]}, words)
    assert supervised(example, words) == "Seven apples.<|im_end|>Nine.<|im_end|>"
    assert not notes


def test_text_is_supervised_whole_and_ids_as_their_mask_says(words: Any) -> None:
    example, _ = encode({"text": "one two three"}, words)
    assert all(example.loss_mask)
    example, _ = encode({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, words)
    assert example == Example([5, 6, 7], [False, True, True])


def test_a_long_document_is_cut_and_counted(words: Any) -> None:
    example, notes = encode({"input_ids": list(range(5, 25))}, words, max_length=8)
    assert len(example.input_ids) == len(example.loss_mask) == 8
    assert notes == {"cut to the maximum length": 1}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "not a JSON object"),
        ({}, "no messages, text or input_ids"),
        ({"messages": []}, "messages is not a list of turns"),
        ({"messages": [{"content": "x"}]}, "a turn without a role"),
        ({"messages": [{"role": "user", "content": None}]}, "a turn whose content is not text"),
        ({"messages": [QUESTION]}, "no assistant turn"),
        ({"text": " "}, "text is empty or not text"),
        ({"text": "half a surrogate: \ud800"}, "the tokenizer refuses it: "),
        ({"input_ids": [10**9]}, "input_ids outside the vocabulary"),
        ({"input_ids": [1, True]}, "input_ids outside the vocabulary"),
        ({"input_ids": [5, 6], "loss_mask": [1]}, "loss_mask of another length than input_ids"),
        ({"input_ids": [5, 6], "loss_mask": [0, 0]}, "too few supervised tokens"),
    ],
)
def test_an_unusable_row_is_skipped_with_its_reason(words: Any, content: Any, reason: str) -> None:
    with pytest.raises(RowSkippedError, match=reason):
        encode(content, words)


JSON = recursive(
    none() | booleans() | integers() | floats() | text(characters(), max_size=6),
    lambda parts: lists(parts, max_size=3) | dictionaries(text(max_size=3), parts, max_size=3),
    max_leaves=4,
)
CONTENT = text(characters(), max_size=20) | JSON
TURN = fixed_dictionaries(
    {}, optional={"role": sampled_from(["system", "user", "assistant"]) | JSON, "content": CONTENT}
)
IDS = lists(integers(-2, 400), max_size=9) | JSON
ROW = JSON | fixed_dictionaries(
    {},
    optional={
        "messages": lists(TURN, max_size=4) | JSON,
        "text": CONTENT,
        "input_ids": IDS,
        "loss_mask": IDS,
    },
)


@given(ROW)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_row_is_encoded_to_known_tokens_or_skipped_with_a_reason_that_a_log_can_hold(
    words: Any, row: Any
) -> None:
    read = Row(row if isinstance(row, dict) else None, "here")
    for of_row in (
        lambda: encode_row(read, words, 16, 1, Counter()).input_ids,
        lambda: encode_prompt(read, words, 17),
    ):
        try:
            ids, reason = of_row(), "none"
        except RowSkippedError as error:
            ids, reason = [0], str(error)
        assert 0 < len(ids) <= 16
        assert all(type(token) is int and 0 <= token < len(words) for token in ids)
        assert reason.encode().decode().splitlines() == [reason]


EMPTY = sampled_from([None, [], {}, "", False])
CALL = {"type": "function", "function": {"name": "count", "arguments": {}}}
TOOLS = "tools or tool calls, which are not supported"
REASONING = "reasoning beside the content of a turn, which is not supported"
OF_ROW = {"tools": [CALL], "functions": [CALL["function"]]}
OF_ROW_EACH = [{name: value} for name, value in OF_ROW.items()]
OF_TURN = {
    "tool_calls": (TOOLS, [CALL]),
    "function_call": (TOOLS, CALL["function"]),
    "reasoning_content": (REASONING, "Let me count."),
    "reasoning": (REASONING, "Let me count."),
    "thinking": (REASONING, "Let me count."),
}


@given(
    dictionaries(sampled_from(sorted(OF_ROW)), EMPTY),
    lists(dictionaries(sampled_from(sorted(OF_TURN)), EMPTY), min_size=4, max_size=4),
    sampled_from([*OF_ROW, *OF_TURN, "role"]),
    integers(0, 3),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_chat_of_which_the_template_is_shown_a_part_is_skipped_unless_that_part_is_empty(
    words: Any, row: dict[str, Any], extra: list[dict[str, Any]], field: str, place: int
) -> None:
    """Reasoning matters only where the answer beside it is learned."""
    turns = [
        {**of_turn, **turn} for turn, of_turn in zip([QUESTION, ANSWER, SECOND, LAST], extra, strict=True)
    ]
    content = {**row, "messages": turns}
    plain = {"messages": [QUESTION, ANSWER, SECOND, LAST]}
    assert encode(content, words) == encode(plain, words)
    assert encode_prompt(Row(content, ""), words, 99) == encode_prompt(Row(plain, ""), words, 99)
    assert chat_turns(content) == plain["messages"]

    reason = TOOLS
    if field in OF_ROW:
        content[field] = OF_ROW[field]
    elif field == "role":
        turns[place]["role"] = "tool"
    else:
        reason, turns[place][field] = OF_TURN[field]
    with pytest.raises(RowSkippedError, match=reason):
        encode(content, words)
    if reason == TOOLS:
        for read in (lambda: encode_prompt(Row(content, ""), words, 99), lambda: chat_turns(content)):
            with pytest.raises(RowSkippedError, match=TOOLS):
                read()
    else:
        assert chat_turns(content) == plain["messages"]


def test_tools_beside_a_chat_are_seen_where_rows_are_encoded(words: Any) -> None:
    rows = [Row({"messages": [QUESTION, ANSWER], "source": "x", **more}, "") for more in ({}, *OF_ROW_EACH)]
    [encoded] = encode_rows(rows, words, 99, 1)
    assert len(encoded.documents) == 1
    assert encoded.skipped == {TOOLS: len(OF_ROW_EACH)}


def test_turns_that_the_template_renders_otherwise_later_are_not_supervised(words: Any) -> None:
    changed = with_template(words, REWRITES_HISTORY)
    example, notes = encode({"messages": [QUESTION, ANSWER, SECOND, LAST]}, changed)
    assert supervised(example, changed) == "<think>Nine.<|im_end|>"
    assert sum(notes.values()) == 1


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (ENDS_TURNS_OTHERWISE, "Seven apples.<|mask|>Nine.<|mask|>"),
        (NO_END_OF_TURN, "assistant: Seven apples.\nassistant: Nine.\n"),
    ],
)
def test_a_turn_need_not_end_with_the_end_of_text(words: Any, template: str, expected: str) -> None:
    """The end of a turn is often another token than the end of text; the answer is not erased for that."""
    changed = with_template(words, template)
    example, notes = encode({"messages": [QUESTION, ANSWER, SECOND, LAST]}, changed)
    assert supervised(example, changed) == expected
    assert not notes
    verify_template(changed)


def test_a_special_token_inside_an_answer_does_not_cut_it(words: Any) -> None:
    changed = with_template(words, NO_END_OF_TURN)
    spoken = {"role": "assistant", "content": "Seven <|mask|> apples."}
    example, _ = encode({"messages": [QUESTION, spoken]}, changed)
    assert supervised(example, changed).rstrip().endswith("apples.")


@pytest.mark.parametrize("template", ["own", REWRITES_HISTORY, ONE_TURN_ONLY])
def test_a_template_whose_mask_is_the_last_answer_is_accepted(words: Any, template: str) -> None:
    verify_template(words if template == "own" else with_template(words, template))


@pytest.mark.parametrize("template", [None, UNLIKE_ITS_PROMPT, DROPS_THE_ANSWER, QUESTIONS_LAST])
def test_a_template_whose_mask_would_be_empty_or_wrong_is_refused(words: Any, template: str | None) -> None:
    changed = copy.deepcopy(words)
    changed.chat_template = template
    with pytest.raises(PayloadError) as caught:
        verify_template(changed)
    assert caught.value.kind == "refused"
