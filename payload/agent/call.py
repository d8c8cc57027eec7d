"""Verb ``call``: run a module of the payload in a venv and pass on what it answers."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Tuple

from payload.agent.child import run_child
from payload.agent.environment import checked_environment, venv_environment
from payload.agent.layout import Layout, active_name, checked_module
from payload.agent.locks import broken_since
from payload.agent.protocol import PROTOCOL, Events, Json, Request
from payload.agent.usage import using
from payload.errors import PayloadError

_KINDS = {"usage", "failed", "refused", "busy"}


def call(request: Request, events: Events) -> Json:
    """Verb: give ``request`` to ``python -m <module>`` in the venv; relay its events; return its result.

    Without ``venv`` or ``release``, those in use are meant.
    Its error becomes this verb's error. Raises PayloadError when it ends without a final line or not within
    ``timeout_s``.
    """
    layout = Layout.at(request.root)
    module = checked_module(request.need("module", str))
    venv, release = _venv_and_release(layout, request)
    environment = venv_environment(layout, venv, release, request.get("cache", str))
    environment.update(checked_environment(request.get("env", dict) or {}))
    timeout_s = request.get("timeout_s", float)
    relay = _Relay(request.nonce, events)
    began = time.time()
    with using(layout.release(release), layout.venv(venv)):
        outcome = run_child(
            [str(_python(layout, venv)), "-m", module],
            environment=environment,
            folder=layout.root,
            request=_request_line(request),
            on_stdout=relay.take,
            on_stderr=_to_stderr,
            timeout_s=timeout_s,
        )
    tail = "\n".join(outcome.stderr_tail)
    if outcome.timed_out:
        raise PayloadError(f"{module} did not end within {timeout_s:.0f} s and was stopped", tail)
    if relay.final:
        return _result(relay.final)
    broken = broken_since(layout, began)
    if broken is not None:
        raise broken
    raise PayloadError(f"{module} ended with exit status {outcome.returncode} and no answer", tail)


def _venv_and_release(layout: Layout, request: Request) -> Tuple[str, str]:
    venv = request.get("venv", str) or active_name(layout.venv_link)
    release = request.get("release", str) or active_name(layout.current)
    if venv is None or release is None:
        missing = "release" if release is None else "venv"
        raise PayloadError(
            f"no {missing} is in use in this container", "Run `deploy`, then `venv`.", "refused"
        )
    if not _python(layout, venv).exists():
        raise PayloadError(f"venv {venv} is not in this container", "Run `venv`.", kind="refused")
    if not layout.release(release).is_dir():
        raise PayloadError(f"release {release} is not in this container", "Run `deploy`.", kind="refused")
    return venv, release


def _python(layout: Layout, venv: str) -> Path:
    return layout.venv(venv) / "bin" / "python"


def _request_line(request: Request) -> bytes:
    """The module's own request, in the envelope of this one."""
    envelope = {"protocol": PROTOCOL, "nonce": request.nonce, "root": request.root}
    if "holder" in request.fields:
        envelope["holder"] = request.fields["holder"]
    return json.dumps({**(request.get("request", dict) or {}), **envelope}).encode("ascii") + b"\n"


class _Relay:
    """Passes a module's events on and keeps its first final line; whatever else it prints goes to stderr."""

    def __init__(self, nonce: str, events: Events) -> None:
        self.final: Json = {}
        self._nonce = nonce
        self._events = events

    def take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict) or message.get("nonce") != self._nonce or self.final:
            _to_stderr(line)
        elif "event" in message:
            self._events.send(message)
        elif isinstance(message.get("result"), dict) or isinstance(message.get("error"), dict):
            self.final = message


def _result(final: Json) -> Json:
    """The result of a final line, whose error is raised."""
    if "result" in final:
        result: Json = final["result"]
        return result
    error = final["error"]
    kind = error.get("kind") if error.get("kind") in _KINDS else "failed"
    raise PayloadError(str(error.get("message", "")), str(error.get("hint", "")), kind=str(kind))


def _to_stderr(line: bytes) -> None:
    sys.stderr.write(line.decode("utf-8", "replace"))
