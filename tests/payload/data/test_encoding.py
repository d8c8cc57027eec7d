"""Rows encoded by several processes become what one makes of them, and no process outlives the one that asked."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from payload.data import encoding
from payload.data.encoding import ROWS_ALONE, Encoded, encode_rows
from payload.data.rows import Row
from payload.errors import PayloadError, ToldToStopError


def some_rows(count: int, seed: int = 0) -> Iterator[Row]:
    """Of all kinds, one in ten of no use."""
    chosen = random.Random(seed)
    for number in range(count):
        answer = " ".join(chosen.choices(("seven", "apples", "or", "pears"), k=chosen.randint(1, 9)))
        turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": answer}]
        content: Any = chosen.choice(
            (
                {"messages": turns, "source": object()},
                {"messages": turns * 2},
                {"text": answer},
                {"input_ids": [5, 6, 7, 8, number % 9], "loss_mask": [0, 1, 1, 1, 1]},
                {"messages": turns[:1]},
                {"input_ids": [-1]},
                None,
            )
        )
        yield Row(content, f"row {number}")


def together(parts: Iterator[Encoded]) -> Encoded:
    whole = Encoded(0, [], Counter(), Counter())
    for part in parts:
        whole = Encoded(
            whole.rows + part.rows,
            whole.documents + part.documents,
            whole.skipped + part.skipped,
            whole.notes + part.notes,
        )
    return whole


def children() -> set[int]:
    """Processes below this one that encode: Python's own tracker of shared resources stays."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # threads and processes come and go
            for pid in (task / "children").read_text().split():
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(int(pid))
    return found


def test_two_processes_make_of_the_rows_what_one_makes_of_them(words: Any) -> None:
    count = ROWS_ALONE + 700
    before = children()
    parts = encode_rows(some_rows(count), words, 24, 2, processes=2)
    assert next(parts).rows == ROWS_ALONE
    second = next(parts)
    assert len(children() - before) == 2
    found = together(iter([second, *parts]))
    alone = encode_rows(some_rows(count), words, 24, 2, processes=1)
    next(alone)
    assert found == together(alone)
    assert found.rows == 700
    assert found.documents
    assert found.skipped["not a JSON object"] > 0
    assert found.notes["cut to the maximum length"] > 0
    assert children() == before


def test_few_rows_and_a_tokenizer_that_cannot_travel_start_no_process(
    words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(encoding, "ProcessPoolExecutor", refuse)
    assert together(encode_rows(some_rows(ROWS_ALONE), words, 24, 2, processes=8)).rows == ROWS_ALONE
    words.held = threading.Lock()
    try:
        assert (
            together(encode_rows(some_rows(ROWS_ALONE + 1), words, 24, 2, processes=8)).rows == ROWS_ALONE + 1
        )
    finally:
        del words.held


def _fail() -> None:
    raise RuntimeError


class Unreadable:
    """Can be pickled, and not read again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _fail, ()


def test_a_tokenizer_that_other_processes_cannot_read_is_used_by_this_one_alone(words: Any) -> None:
    count = ROWS_ALONE + 200
    expected = together(encode_rows(some_rows(count), words, 24, 2, processes=1))
    words.held = Unreadable()
    try:
        found = together(encode_rows(some_rows(count), words, 24, 2, processes=2))
    finally:
        del words.held
    assert found == expected


def test_a_row_that_nests_too_deeply_to_be_sent_is_skipped_as_one_process_skips_it(words: Any) -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    rows = [*some_rows(ROWS_ALONE + 200), Row({"text": deep}, "deep")]
    expected = together(encode_rows(iter(rows), words, 24, 2, processes=1))
    assert together(encode_rows(iter(rows), words, 24, 2, processes=2)) == expected
    assert expected.skipped["text is empty or not text"] == 1


def test_rows_that_end_in_an_error_leave_no_process_behind(words: Any) -> None:
    def stopped() -> Iterator[Row]:
        yield from some_rows(ROWS_ALONE + 200)
        raise KeyboardInterrupt

    before = children()
    with pytest.raises(KeyboardInterrupt):
        together(encode_rows(stopped(), words, 24, 2, processes=2))
    assert children() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_when_one_process_is_killed_the_others_go_too_and_it_is_said_unless_the_rows_tell_of_a_stop(
    words: Any, number: signal.Signals
) -> None:
    """Rows are large, so that more of them wait to be sent than the way to a process holds."""
    before = children()

    def killing(*, told_to_stop: bool) -> Iterator[Row]:
        yield from some_rows(ROWS_ALONE)
        yield from (Row({"text": "seven apples " * 400}, "") for _ in range(640))
        os.kill(max(children() - before), number)
        time.sleep(0.5)
        yield from some_rows(64)
        if told_to_stop:
            raise ToldToStopError("Told to stop.")
        yield from some_rows(640)

    with pytest.raises(PayloadError, match="ended from outside"):
        together(encode_rows(killing(told_to_stop=False), words, 24, 2, processes=2))
    assert children() == before
    with pytest.raises(ToldToStopError):
        together(encode_rows(killing(told_to_stop=True), words, 24, 2, processes=2))
    assert children() == before


def test_processes_go_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys, time
        from payload.data.encoding import ROWS_ALONE, encode_rows
        from payload.data.rows import Row
        from payload.demo import corpus, tokenizer

        def rows():
            for number in range(ROWS_ALONE + 1000):
                yield Row({"text": "seven apples"}, "")
            from pathlib import Path
            for task in Path("/proc/self/task").iterdir():
                print((task / "children").read_text(), end=" ")
            print(flush=True)
            time.sleep(60)

        texts = [turn["content"] for row in corpus.rows("train", 50) for turn in row["messages"]]
        words = tokenizer.train_tokenizer(texts)
        for _ in encode_rows(rows(), words, 16, 1, processes=2):
            pass
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) >= 2
        parent.kill()
    deadline = time.monotonic() + 20
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
