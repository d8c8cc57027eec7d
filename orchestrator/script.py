"""Script: a file of the desk, run in the container as the program that it is. One command on the host."""

from __future__ import annotations

import base64
import hashlib
import shlex
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.agent import Agent
from orchestrator.answers import Output, ScriptEnd, decoded, understood
from orchestrator.errors import UsageError

MOST_BYTES = 4 * 1024 * 1024


def run_script(
    agent: Agent,
    file: Path,
    arguments: Sequence[str],
    write: Callable[[str, bytes], None],
    *,
    in_venv: bool = False,
    timeout_s: float | None = None,
) -> int:
    """Run ``file`` with ``arguments`` in the container and return its exit status.

    ``write`` takes (``stdout`` or ``stderr``, bytes) as they come. ``in_venv``: with the venv in use on PATH.
    Raises :class:`UsageError` for a file that cannot be read or has no ``#!`` line, and
    :class:`orchestrator.errors.OrchestratorError`.
    """
    content = _content(file)

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "output":
            output = understood(Output, event, agent.container, "script")
            write(output["stream"], decoded(output["data"], agent.container, "script"))

    request = {
        "name": file.name,
        "content": base64.b64encode(content).decode("ascii"),
        "sha256": hashlib.sha256(content).hexdigest(),
        "args": list(arguments),
        "venv": in_venv,
        "timeout_s": timeout_s,
    }
    return agent.ask(ScriptEnd, "script", request, on_event=on_event)["exit_status"]


def _content(file: Path) -> bytes:
    try:
        status = file.stat()
        # A pipe or a device has no end that could be waited for, and may have no beginning.
        if not stat.S_ISREG(status.st_mode):
            what = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
            raise UsageError(f"{file} is {what}, not a regular file.", "Write the script to a file first.")
        if status.st_size > MOST_BYTES:
            raise UsageError(
                f"{file} has more than {MOST_BYTES >> 20} MiB.", "A script is meant; send data another way."
            )
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from None
    first = content.split(b"\n", 1)[0]
    if first.startswith(b"#!") and first.endswith(b"\r"):
        raise UsageError(
            f"{file} has Windows line ends: its #! line would name a program that ends in a carriage return.",
            f"Save it with Unix line ends: sed -i 's/\\r$//' {shlex.quote(str(file))}",
        )
    return content
