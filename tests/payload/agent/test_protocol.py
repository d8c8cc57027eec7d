"""One request, lines of JSON, one final line: whatever a module prints, whoever goes away."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from payload.agent.protocol import Events, UnansweredRequest, read_request
from payload.errors import PayloadError
from tests.payload.agent.container import FakeContainer, is_running, wait_until_written


def raw(container: FakeContainer, verb: str, data: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [container.python, "-I", str(container.agent), verb], input=data, capture_output=True, timeout=30
    )


def test_another_protocol_is_refused_by_the_names_of_both(container: FakeContainer) -> None:
    request = {"protocol": 7, "nonce": "ab", "root": str(container.root)}
    done = raw(container, "hello", json.dumps(request).encode() + b"\n")
    answer = json.loads(done.stdout)
    assert done.returncode == 1
    assert answer["nonce"] == "ab"
    assert answer["error"]["kind"] == "usage"
    assert "protocol 7" in answer["error"]["message"]
    assert "protocol 1" in answer["error"]["message"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]\n",
        b"\xff\n",
        b"not json\n",
        b'{"protocol": 1}\n',
        b'{"protocol":1,"nonce":"a b","root":"/x/y"}\n',
    ],
)
def test_a_request_that_cannot_be_read_gets_an_error_and_no_traceback(
    container: FakeContainer, data: bytes
) -> None:
    done = raw(container, "status", data)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["kind"] == "usage"
    assert b"Traceback" not in done.stderr


@given(
    st.binary(max_size=200)
    | st.text(max_size=100).map(lambda text: json.dumps({"nonce": text}).encode() + b"\n")
)
@settings(max_examples=100, deadline=None)
def test_arbitrary_bytes_as_a_request_are_an_error_of_its_own(data: bytes) -> None:
    with pytest.raises((PayloadError, UnansweredRequest)):
        read_request(io.BytesIO(data))


@pytest.mark.parametrize("root", ["relative/path", "/", "/opt", "/opt/../etc/x", "", "/opt/dfl\0ash"])
def test_a_root_that_is_no_folder_of_its_own_is_refused(container: FakeContainer, root: str) -> None:
    agent = container.agent
    request = {"protocol": 1, "nonce": "ab", "root": root}
    done = subprocess.run(
        [sys.executable, "-I", str(agent), "status"],
        input=json.dumps(request).encode() + b"\n",
        capture_output=True,
        timeout=30,
    )
    assert json.loads(done.stdout)["error"]["kind"] == "usage"


def test_an_unknown_verb_is_a_usage_error(container: FakeContainer) -> None:
    done = raw(container, "dance", b"")
    assert done.returncode == 2
    assert b"usage" in done.stderr


def test_a_field_of_another_type_is_named(container: FakeContainer) -> None:
    error = container.error("logs", offset="12")
    assert error["kind"] == "usage"
    assert "'offset'" in error["message"]


def test_a_module_is_answered_and_its_printing_harms_nothing(container: FakeContainer) -> None:
    reply = container.ask("call", module="payload.echo", request={"x": [1]}, timeout_s=30, env={})
    assert reply.result == {"fields": {"x": [1]}, "root": str(container.root)}
    assert reply.events == [{"event": "progress", "message": "working", "done": 1, "total": 2}]
    assert "a chatty library" in reply.stderr


def test_a_modules_error_is_the_verbs_error(container: FakeContainer) -> None:
    reply = container.ask("call", module="payload.refuses", timeout_s=30)
    assert reply.error == {"kind": "refused", "message": "the message", "hint": "the hint"}
    assert "written past Python" in reply.stderr


def test_a_module_without_an_answer_is_an_error_with_its_last_lines(container: FakeContainer) -> None:
    error = container.error("call", module="payload.dies", timeout_s=30)
    assert "exit status 7" in error["message"]
    assert error["hint"].splitlines() == [f"line {number}" for number in range(10, 30)]


def test_only_the_first_final_line_with_the_right_nonce_counts(container: FakeContainer) -> None:
    assert container.result("call", module="payload.forges", timeout_s=30) == {"first": True}


@pytest.mark.parametrize(
    "module", ["os", "payload", "payload.x;y", "payload..x", "../payload.x", "payload.x\n"]
)
def test_only_modules_of_the_payload_can_be_called(container: FakeContainer, module: str) -> None:
    assert container.error("call", module=module, timeout_s=30)["kind"] == "usage"


def hanging(container: FakeContainer, tmp_path: Path) -> tuple[dict[str, object], list[Path]]:
    prefix = tmp_path / "pid"
    files = [Path(f"{prefix}.module"), Path(f"{prefix}.grandchild")]
    return {"module": "payload.hangs", "env": {"PIDS": str(prefix)}}, files


def test_a_module_that_does_not_end_in_time_is_ended_with_its_whole_tree(
    container: FakeContainer, tmp_path: Path
) -> None:
    fields, files = hanging(container, tmp_path)
    error = container.error("call", **fields, timeout_s=1.5)
    assert "within 2 s" in error["message"]
    assert not [pid for pid in (int(file.read_text()) for file in files) if is_running(pid)]


def test_a_module_is_ended_when_nobody_reads_the_answer_any_more(
    container: FakeContainer, tmp_path: Path
) -> None:
    fields, files = hanging(container, tmp_path)
    process = container.open("call", **fields, timeout_s=600)
    pids = [int(wait_until_written(file)) for file in files]
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    process.communicate(timeout=20)
    assert not [pid for pid in pids if is_running(pid)]


def test_a_module_does_not_outlive_an_agent_that_was_killed(container: FakeContainer, tmp_path: Path) -> None:
    fields, files = hanging(container, tmp_path)
    process = container.open("call", **fields, timeout_s=600)
    module, grandchild = [int(wait_until_written(file)) for file in files]
    process.kill()
    process.wait()
    os.kill(grandchild, 9)
    deadline = time.monotonic() + 5
    while is_running(module) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(module)


def test_lines_of_many_threads_stay_whole() -> None:
    reader, writer = os.pipe()
    events = Events(writer, "ab")

    def send(thread: int) -> None:
        for number in range(50):
            events.progress(f"{thread}:{number}" + "x" * 3000)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
    received = bytearray()

    def drain() -> None:
        while data := os.read(reader, 65536):
            received.extend(data)

    drainer = threading.Thread(target=drain)
    drainer.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(writer)
    drainer.join()
    os.close(reader)
    messages = [json.loads(line)["message"].rstrip("x") for line in bytes(received).splitlines()]
    assert sorted(messages) == sorted(f"{thread}:{number}" for thread in range(8) for number in range(50))
