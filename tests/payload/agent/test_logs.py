"""A run's log arrives byte for byte, from any place, and while it grows."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from payload.agent.logs import offset_at, tail_offset
from tests.payload.agent.container import FakeContainer, parse, until


@pytest.fixture
def finished(container: FakeContainer) -> FakeContainer:
    """A container whose run r1 is over; its log can be put there at will."""
    container.start("r1", "")
    container.wait_for_state("r1", "finished")
    return container


def log_of(container: FakeContainer) -> Path:
    return container.root / "runs/r1/output.log"


@given(st.binary(max_size=300).map(lambda data: data.replace(b"\x01", b"\n")), st.integers(0, 8))
@settings(max_examples=200, deadline=None)
def test_the_tail_is_what_splitting_into_lines_says(data: bytes, lines: int) -> None:
    pieces = io.BytesIO(data).readlines()
    expected = b"".join(pieces[len(pieces) - min(lines, len(pieces)) :])
    assert data[tail_offset(io.BytesIO(data), lines) :] == expected


def test_the_tail_of_a_log_longer_than_one_block_is_found() -> None:
    data = b"".join(b"%d %s\n" % (number, b"x" * (number % 3000)) for number in range(300))
    for lines in (1, 7, 150, 299, 300, 301):
        expected = b"".join(data.splitlines(keepends=True)[-lines:])
        assert data[tail_offset(io.BytesIO(data), lines) :] == expected


def test_the_time_index_gives_the_last_size_noted_before_the_moment(tmp_path: Path) -> None:
    index = tmp_path / "output.index"
    assert offset_at(index, 0.0) == 0
    entries = [json.dumps({"t": 10.0 + number, "offset": 100 * number}) for number in range(5)]
    index.write_text("\n".join([*entries[:2], '{"t": 11', *entries[2:]]) + "\n")
    assert [offset_at(index, moment) for moment in (9.0, 10.5, 12.0, 99.0)] == [0, 0, 200, 400]


def test_any_bytes_arrive_as_they_were_written(finished: FakeContainer) -> None:
    data = bytes(range(256)) * 700 + b"no newline at the end"
    log_of(finished).write_bytes(data)
    reply = finished.ask("logs", run_id="r1")
    assert reply.log() == data
    assert reply.result == {"run_id": "r1", "offset": len(data), "state": "finished"}
    assert max(len(event["data"]) for event in reply.events) <= 64 * 1024 * 4 // 3 + 4
    assert finished.ask("logs", run_id="r1", offset=1000).log() == data[1000:]


def test_without_a_run_id_the_newest_run_is_meant(finished: FakeContainer) -> None:
    finished.start("a-later-run", "print('later')")
    finished.wait_for_state("a-later-run", "finished")
    reply = finished.ask("logs")
    assert reply.log() == b"later\n"
    assert {event["run_id"] for event in reply.events} == {"a-later-run"}


def test_without_any_run_the_error_says_so(container: FakeContainer) -> None:
    assert "no run" in container.error("logs")["message"]
    assert "r9" in container.error("logs", run_id="r9")["message"]


def test_following_gives_every_byte_and_ends_with_the_run(container: FakeContainer) -> None:
    code = (
        "import time\nfor number in range(300):\n    print(number, 'x' * 200, flush=True); time.sleep(0.003)"
    )
    container.start("r1", code)
    reply = container.ask("logs", run_id="r1", follow=True)
    assert reply.log() == log_of(container).read_bytes()
    assert len(reply.log().splitlines()) == 300
    assert reply.result is not None
    assert reply.result["state"] == "finished"


def test_following_can_be_cut_and_resumed_without_losing_a_byte(container: FakeContainer) -> None:
    code = "import time\nfor number in range(200):\n    print(number, flush=True); time.sleep(0.01)"
    container.start("r1", code)
    data = b""
    for cut in range(6):
        process = container.open("logs", run_id="r1", follow=True, offset=len(data))
        time.sleep(0.1 + 0.03 * cut)
        os.killpg(process.pid, signal.SIGKILL)
        stdout = process.communicate()[0]
        whole = stdout[: stdout.rfind(b"\n") + 1]
        events = parse(whole, "ab")[0]
        for event in events:
            assert event["offset"] == len(data)
            data += base64.b64decode(event["data"])
    data += container.ask("logs", run_id="r1", follow=True, offset=len(data)).log()
    assert data == b"".join(b"%d\n" % number for number in range(200))


@pytest.mark.parametrize("replaced", [False, True])
def test_a_log_that_was_cut_or_replaced_is_noticed_and_sent_anew(
    container: FakeContainer, replaced: bool
) -> None:
    container.start("r1", "import time; print('x' * 5000, flush=True); time.sleep(600)")
    for _ in until():
        if log_of(container).exists() and log_of(container).stat().st_size > 5000:
            break
    process = container.open("logs", run_id="r1", follow=True)
    time.sleep(0.4)
    if replaced:
        (container.root / "other").write_bytes(b"another log of more bytes\n" * 300)
        (container.root / "other").rename(log_of(container))
    else:
        log_of(container).write_bytes(b"short\n")
    time.sleep(0.3)
    container.result("stop", run_id="r1", grace_s=0)
    events = parse(process.communicate(timeout=30)[0], "ab")[0]
    (note,) = [event for event in events if event["event"] == "note"]
    assert "from its beginning" in note["message"]
    after = [event for event in events[events.index(note) :] if event["event"] == "log"]
    assert after[0]["offset"] == 0


def test_since_skips_what_was_written_long_before(container: FakeContainer) -> None:
    container.start("r1", "import time; print('early', flush=True); time.sleep(3); print('late', flush=True)")
    container.wait_for_state("r1", "finished")
    assert container.ask("logs", run_id="r1", since_s=600).log() == b"early\nlate\n"
    time.sleep(max(0.0, container.state_file("r1")["ended_at"] + 0.5 - time.time()))
    assert container.ask("logs", run_id="r1", since_s=2.2).log() == b"late\n"


@pytest.mark.parametrize("field", ["offset", "tail", "since_s"])
def test_negative_places_are_refused(finished: FakeContainer, field: str) -> None:
    assert finished.error("logs", run_id="r1", **{field: -1})["kind"] == "usage"


def test_a_backlog_is_read_at_50_megabytes_a_second(finished: FakeContainer) -> None:
    block = (b"x" * 120 + b"\n") * 8192
    with log_of(finished).open("wb") as file:
        for _ in range(60):
            file.write(block)
    size = log_of(finished).stat().st_size
    best_s = min(_drain(finished, size) for _ in range(2))
    assert size / best_s >= 50e6, f"{size / best_s / 1e6:.0f} MB/s"


def _drain(container: FakeContainer, size: int) -> float:
    began = time.monotonic()
    process = container.open("logs", run_id="r1")
    assert process.stdout is not None
    received = 0
    while chunk := process.stdout.read(1 << 20):
        received += len(chunk)
    process.communicate(timeout=30)
    assert received > size * 4 // 3
    return time.monotonic() - began
