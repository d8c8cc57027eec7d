"""What is shown: a container's text cannot command the terminal, and a log in a pipe is the log."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.console import Console, LogWriter, safe
from orchestrator.errors import RemoteError


def chunks(data: bytes, sizes: list[int]) -> list[bytes]:
    parts, start = [], 0
    for size in sizes:
        parts.append(data[start : start + size])
        start += size
    return [*parts, data[start:]]


@given(st.text())
def test_safe_text_holds_no_control_characters_but_layout(text: str) -> None:
    assert not [c for c in safe(text) if (ord(c) < 32 or 127 <= ord(c) < 160) and c not in "\n\r\t"]


def test_escape_sequences_disappear_whole() -> None:
    assert safe("a\x1b[2Jb\x1b[31mred\x1b[0m\x1b]0;title\x07c") == "abredc"


def test_a_steps_outcome_is_one_line_whatever_a_container_says(capsys: pytest.CaptureFixture[str]) -> None:
    with Console().step("prune") as report:
        report.outcome = "removed x\x1b]0;title\x07\nfake line\r\x1b[31m"
    said = capsys.readouterr().err
    assert said.startswith("✓ prune   removed x fake line")
    assert len(said.splitlines()) == 1
    assert "\x1b" not in said


ATTACK = "\x1b]0;owned\x07\x1b[2J\x9b31m\x1b]52;c;b3duZWQ=\x07\x1b[1;1H\x08\x7fs\reen\ud800"


def note(console: Console) -> None:
    with console.step("fetch") as report:
        report.note(ATTACK)


def outcome(console: Console) -> None:
    with console.step("fetch") as report:
        report.outcome = ATTACK


def progress(console: Console) -> None:
    with console.step("fetch") as report:
        report._last_plain = -100
        report.update(ATTACK)


WAYS_OUT: dict[str, Callable[[Console], None]] = {
    "line": lambda console: console.line(ATTACK, "bold"),
    "say": lambda console: console.say(ATTACK),
    "error": lambda console: console.error(RemoteError(ATTACK, ATTACK)),
    "table": lambda console: console.table((ATTACK, "x"), [(ATTACK, 1)]),
    "note": note,
    "outcome": outcome,
    "progress": progress,
}


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("way", WAYS_OUT)
def test_no_way_out_lets_a_container_command_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, way: str, terminal: bool
) -> None:
    monkeypatch.setattr(
        "orchestrator.console._is_terminal", lambda _: terminal and way in ("line", "say", "error")
    )
    WAYS_OUT[way](Console())
    shown = "".join(capsys.readouterr())
    assert "s een" in shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", shown)


@pytest.mark.parametrize(
    "counts",
    [{}, {"done": 1}, {"done": "x", "total": 2}, {"done": 1, "total": None}, {"done": [], "total": {}}],
)
def test_progress_that_counts_in_no_numbers_is_shown_without_them(
    capsys: pytest.CaptureFixture[str], counts: dict[str, object]
) -> None:
    with Console().step("fetch") as report:
        report._last_plain = -100
        report.on_event({"event": "progress", "message": "coming", **counts})
    assert "coming\n" in capsys.readouterr().err


def test_printable_text_of_any_language_stays() -> None:
    assert safe("Zürich 東京 🙂\tx\r\n") == "Zürich 東京 🙂\tx\r\n"


@given(st.binary(max_size=400), st.lists(st.integers(0, 50), max_size=10))
def test_a_log_in_a_file_is_byte_exact(data: bytes, sizes: list[int]) -> None:
    stream = io.BytesIO()
    writer = LogWriter(stream, is_terminal=False)
    for chunk in chunks(data, sizes):
        writer.write(chunk)
    assert stream.getvalue() == data


@given(st.text(max_size=60), st.lists(st.integers(0, 9), max_size=30))
def test_on_a_terminal_the_split_into_chunks_does_not_show(text: str, sizes: list[int]) -> None:
    data = (text + "\x1b[31mend\x1b[0m.\n").encode("utf-8", errors="replace")
    stream = io.BytesIO()
    writer = LogWriter(stream, is_terminal=True)
    for chunk in chunks(data, sizes):
        writer.write(chunk)
    assert stream.getvalue().decode() == safe(data.decode())


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=json_like)
def test_json_is_json_whatever_numbers_a_container_tells(
    value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    Console().json({"value": value, "worst": [float("inf"), {"loss": float("nan")}, -float("inf")]})
    shown = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert shown["worst"] == [None, {"loss": None}, None]
