"""Scripts: any file, name and arguments arrive as they are; what it says and how it ends come back; nothing is left."""

from __future__ import annotations

import base64
import hashlib
import time
from typing import Any

import pytest

from tests.payload.agent.container import FakeContainer, Reply

TELL = b"""#!/usr/bin/env python3
import os, sys
print(sys.argv, os.path.basename(sys.argv[0]), sys.stdin.read() == "")
sys.stderr.write("and this\\n")
sys.exit(7)
"""


def ask(container: FakeContainer, program: bytes, /, name: str = "probe.py", **fields: Any) -> Reply:
    request: dict[str, Any] = {
        "name": name,
        "content": base64.b64encode(program).decode(),
        "sha256": hashlib.sha256(program).hexdigest(),
        **fields,
    }
    return container.ask("script", **request)


def said(reply: Reply, stream: str) -> bytes:
    events = [event for event in reply.events if event["event"] == "output" and event["stream"] == stream]
    return b"".join(base64.b64decode(event["data"]) for event in events)


def test_a_script_gets_its_arguments_says_its_words_and_ends_with_its_status(
    container: FakeContainer,
) -> None:
    arguments = ["", "a b", "$HOME", "'", '"', "`id`", "-x", "é\n"]
    reply = ask(container, TELL, "a 'quoted' $name.py", args=arguments)
    assert reply.result == {"exit_status": 7}
    out = said(reply, "stdout").decode()
    assert repr(arguments)[1:-1] in out
    assert "a 'quoted' $name.py True" in out
    assert said(reply, "stderr") == b"and this\n"
    assert list((container.root / "incoming").iterdir()) == []


def test_a_script_in_the_venv_has_the_venvs_python_first(container: FakeContainer) -> None:
    tell = b"#!/bin/sh\ncommand -v python\n"
    assert f"{container.root}/venvs/" in said(ask(container, tell, venv=True), "stdout").decode()
    assert f"{container.root}/venvs/" not in said(ask(container, tell), "stdout").decode()


def test_bytes_that_are_no_text_and_a_last_line_without_its_end_come_back_whole(
    container: FakeContainer,
) -> None:
    reply = ask(container, b"#!/bin/sh\nprintf '\\377\\000\\nend'\n")
    assert said(reply, "stdout") == b"\xff\0\nend"


def test_a_script_that_does_not_end_is_stopped_with_all_it_started(container: FakeContainer) -> None:
    began = time.monotonic()
    reply = ask(container, b"#!/bin/sh\nsleep 600 & sleep 600\n", timeout_s=0.5)
    assert reply.error is not None
    assert "did not end within 0.5 s" in reply.error["message"]
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "../x"}, "no file name"),
        ({"name": ""}, "no file name"),
        ({"sha256": "0" * 64}, "damaged"),
        ({"content": "%"}, "not base64"),
        ({"args": [1]}, "an argument is no text"),
    ],
)
def test_a_request_that_cannot_be_is_refused(
    container: FakeContainer, fields: dict[str, Any], words: str
) -> None:
    reply = ask(container, TELL, **fields)
    assert reply.error is not None
    assert words in reply.error["message"]


def test_a_file_that_names_no_interpreter_says_what_to_write(container: FakeContainer) -> None:
    reply = ask(container, b"print(1)\n")
    assert reply.error is not None
    assert "#!/usr/bin/env python3" in reply.error["hint"]


@pytest.mark.parametrize("interpreter", ["/no/such/interpreter", "/bin/sh\r", "relative/sh"])
def test_an_interpreter_that_is_not_there_is_said_once(container: FakeContainer, interpreter: str) -> None:
    reply = ask(container, f"#! {interpreter} -x\n".encode())
    assert reply.error is not None
    assert f"probe.py cannot be run: its #! line names {interpreter!r}" in reply.error["message"]
    assert reply.error["kind"] == "usage"
    assert [event for event in reply.events if event["event"] == "output"] == []
    assert list((container.root / "incoming").iterdir()) == []


def test_what_the_kernel_runs_not_for_another_reason_is_said_once_too(container: FakeContainer) -> None:
    reply = ask(container, b"\x7fELF, and nothing of it")
    assert reply.error is not None
    assert "probe.py cannot be run: Exec format error" in reply.error["message"]
    assert said(reply, "stderr") == b""


def test_the_exit_status_of_a_command_that_is_not_found_is_the_scripts_own(container: FakeContainer) -> None:
    reply = ask(container, b"#!/bin/sh\nno-such-command\n")
    assert reply.result == {"exit_status": 127}
    assert said(reply, "stderr").count(b"no-such-command") == 1


def test_standard_error_comes_back_byte_for_byte(container: FakeContainer) -> None:
    reply = ask(container, b"#!/bin/sh\nprintf 'a  \\n\\n\\377 end' >&2\n")
    assert said(reply, "stderr") == b"a  \n\n\xff end"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_line_of_any_length_comes_back_whole_in_protocol_lines_that_the_desk_takes(
    container: FakeContainer, stream: str
) -> None:
    program = f"#!/usr/bin/env python3\nimport sys\nsys.{stream}.write('x' * 20_000_000 + '\\n')\n"
    reply = ask(container, program.encode())
    assert said(reply, stream) == b"x" * 20_000_000 + b"\n"
    assert max(len(event["data"]) for event in reply.events if event["event"] == "output") < 2 * 1024 * 1024
