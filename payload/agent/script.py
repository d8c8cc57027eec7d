"""Verb ``script``: run a program that travels as a file, and nothing is quoted on the way."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Dict, List, Tuple

from payload.agent.child import NotRun, run_child
from payload.agent.environment import base_environment, venv_environment
from payload.agent.layout import Layout, active_name
from payload.agent.protocol import Events, Json, Request
from payload.agent.usage import using
from payload.errors import PayloadError

_PIECE_BYTES = 1024 * 1024


def script(request: Request, events: Events) -> Json:
    """Verb: put ``content`` (base64, checked by ``sha256``) under the file name ``name``, run it, remove it.

    It is run as any program is: by its ``#!`` line, or as ELF, with ``args``, in the folder it lies in, without
    standard input. With ``venv``, the environment is that of a payload module in the venv in use, so that
    ``#!/usr/bin/env python3`` is the venv's Python; else PATH, HOME and LANG. Its lines come as events ``output`` with
    ``stream`` (``stdout`` or ``stderr``) and ``data`` (base64), a long one in pieces. Returns ``exit_status``, 128 + N
    for signal N. Raises PayloadError when it cannot be run, or does not end within ``timeout_s`` and was stopped,
    with everything that it had started.
    """
    layout = Layout.at(request.root)
    arguments = _arguments(request)
    timeout_s = request.get("timeout_s", float)
    environment, used = _environment(layout, in_venv=bool(request.get("venv", bool)))
    folder = layout.incoming / f"script-{secrets.token_hex(8)}"
    program = folder / _file_name(request.need("name", str))
    content = _content(request)
    folder.mkdir(parents=True, mode=0o700)
    try:
        with os.fdopen(os.open(program, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "wb") as file:
            file.write(content)
        with using(folder, *used):
            outcome = run_child(
                [str(program), *arguments],
                environment=environment,
                folder=folder,
                on_stdout=lambda line: _output(events, "stdout", line),
                on_stderr=lambda line: _output(events, "stderr", line),
                timeout_s=timeout_s,
            )
    except NotRun as error:
        raise _not_run(program.name, content, error.reason) from None
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
    if outcome.timed_out:
        raise PayloadError(f"{program.name} did not end within {timeout_s:g} s and was stopped")
    status = outcome.returncode
    return {"exit_status": status if status >= 0 else 128 - status}


def _output(events: Events, stream: str, line: bytes) -> None:
    # The desk takes no protocol line of more than 8 MiB.
    for start in range(0, len(line), _PIECE_BYTES):
        data = base64.b64encode(line[start : start + _PIECE_BYTES])
        events.event("output", stream=stream, data=data.decode("ascii"))


def _not_run(name: str, content: bytes, reason: str) -> PayloadError:
    """Why the kernel did not run the script: it says the same of a missing interpreter as of a missing file."""
    # As the kernel reads it: a carriage return of an editor belongs to the name.
    line = re.match(rb"#![ \t]*([^ \t\n]+)", content)
    interpreter = os.fsdecode(line.group(1)) if line else ""
    if interpreter and not Path(interpreter).exists():
        return PayloadError(
            f"{name} cannot be run: its #! line names {interpreter!r}, which is not in the container",
            "Install it there, or name another: #!/usr/bin/env python3, for example.",
            kind="usage",
        )
    return PayloadError(f"{name} cannot be run: {reason}")


def _arguments(request: Request) -> List[str]:
    arguments = request.get("args", list) or []
    if not all(isinstance(argument, str) and "\0" not in argument for argument in arguments):
        raise PayloadError("an argument is no text, or holds a NUL byte", kind="usage")
    return arguments


def _file_name(name: str) -> str:
    """The name alone: it may hold anything that a file's name can."""
    if not name or len(os.fsencode(name)) > 255 or "/" in name or "\0" in name or name in (".", ".."):
        raise PayloadError(f"{name!r} is no file name", kind="usage")
    return name


def _content(request: Request) -> bytes:
    try:
        content = base64.b64decode(request.need("content", str), validate=True)
    except binascii.Error as error:
        raise PayloadError(f"the script's content is not base64: {error}", kind="usage") from None
    if hashlib.sha256(content).hexdigest() != request.need("sha256", str):
        raise PayloadError("the script was damaged on its way", "Try again.")
    if content[:2] != b"#!" and content[:4] != b"\x7fELF":
        raise PayloadError(
            "the script has no #! line, so the kernel does not know what runs it",
            "Begin it with, for example, #!/usr/bin/env python3",
            kind="usage",
        )
    return content


def _environment(layout: Layout, *, in_venv: bool) -> Tuple[Dict[str, str], List[Path]]:
    """The script's environment, and the folders that it uses by it."""
    if not in_venv:
        return base_environment(), []
    venv, release = active_name(layout.venv_link), active_name(layout.current)
    if venv is None or release is None:
        raise PayloadError("no venv is in use in this container", "Run `venv` first.", kind="refused")
    return venv_environment(layout, venv, release, None), [layout.venv(venv), layout.release(release)]
