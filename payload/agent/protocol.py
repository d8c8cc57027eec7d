"""The agent protocol, container side: one JSON request in, JSON lines out, one final line.

stdin carries one line: ``{"protocol": 1, "nonce": N, "root": "/opt/dflash", ...fields}``. stdout carries
events, then exactly one final line: ``{"nonce": N, "result": {...}}``, or an ``error`` of kind, message, hint.
The caller takes a missing final line for a failed transport, whatever the exit status was.

A module that runs in a venv answers the same protocol::

    def handler(request: Request, events: Events) -> dict:
        events.progress("compiling", done=1, total=4)
        return {"seconds": 12.5}

    if __name__ == "__main__":
        sys.exit(serve(handler))
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import re
import sys
import threading
from dataclasses import dataclass
from typing import Any, BinaryIO, Callable, Dict, Mapping, Optional, Type, TypeVar

from payload.errors import PayloadError

PROTOCOL = 1
MAX_REQUEST_BYTES = 64 * 1024 * 1024
ALIVE_INTERVAL_S = 5.0

Json = Dict[str, Any]
T = TypeVar("T")


class CallerGone(Exception):
    """Nobody reads the answer any more: the connection ended or the caller was stopped."""


@dataclass(frozen=True)
class Request:
    """One request: the envelope, and the verb's own fields (read through :meth:`need` and :meth:`get`)."""

    nonce: str
    root: str
    fields: Mapping[str, Any]

    def need(self, name: str, kind: Type[T]) -> T:
        """The field ``name``, which must be there. Raises PayloadError of kind ``usage``."""
        value = self.get(name, kind)
        if value is None:
            raise PayloadError(f"the request lacks the field {name!r}", kind="usage")
        return value

    def get(self, name: str, kind: Type[T]) -> Optional[T]:
        """The field ``name``, or None when it is missing or null. An int will do where a float is asked."""
        value = self.fields.get(name)
        if value is None:
            return None
        if kind is float and type(value) is int:
            return kind(value)  # type: ignore[call-arg]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise PayloadError(
                f"the request's field {name!r} is a {type(value).__name__}, expected {kind.__name__}",
                kind="usage",
            )
        return value


class Events:
    """The way back to the caller: writes protocol lines. Safe to use from any thread.

    With ``outlive_caller`` the work goes on when nobody reads any more; else writing raises CallerGone.
    """

    def __init__(self, descriptor: int, nonce: str, outlive_caller: bool = False) -> None:
        self.nonce = nonce
        self._descriptor = descriptor
        self._outlive_caller = outlive_caller
        self._lock = threading.Lock()

    def progress(self, message: str, done: Optional[int] = None, total: Optional[int] = None) -> None:
        """A step of the work, with a count where there is one."""
        counts = {name: count for name, count in (("done", done), ("total", total)) if count is not None}
        self.event("progress", message=message, **counts)

    def note(self, message: str) -> None:
        """A line that a person should see."""
        self.event("note", message=message)

    def log(self, run_id: str, offset: int, data: bytes) -> None:
        """Bytes of a run's log that begin at byte ``offset``."""
        # Built by hand: base64 and names need no escaping, and a backlog has thousands of these.
        head = (
            f'{{"nonce": "{self.nonce}", "event": "log", "run_id": "{run_id}", "offset": {offset}, "data": "'
        )
        self._write(b"".join((head.encode("ascii"), base64.b64encode(data), b'"}\n')))

    def event(self, name: str, **fields: Any) -> None:
        """Any other event."""
        self.send({"event": name, **fields})

    def send(self, message: Json) -> None:
        """A whole message, under this request's nonce."""
        self._write(json.dumps({"nonce": self.nonce, **message}).encode("ascii") + b"\n")

    def _write(self, line: bytes) -> None:
        with self._lock:
            view = memoryview(line)
            try:
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EBADF):
                    raise
                if not self._outlive_caller:
                    raise CallerGone from None


Handler = Callable[[Request, Events], Json]


def protect_stdout() -> int:
    """Move the protocol away from fd 1 and let fd 1 be stderr, so that no library can write into it.

    Returns the descriptor to write the protocol to. It is not inherited by child processes.
    """
    sys.stdout.flush()
    descriptor = os.dup(1)
    os.dup2(2, 1)
    return descriptor


def read_request(stream: BinaryIO) -> Request:
    """Read the one request line. Raises PayloadError of kind ``usage``."""
    line = stream.readline(MAX_REQUEST_BYTES + 1)
    if not line.endswith(b"\n"):
        raise PayloadError("the request is cut off: its line has no end", kind="usage")
    try:
        fields = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise PayloadError(f"the request is not JSON: {error}", kind="usage") from None
    if not isinstance(fields, dict):
        raise PayloadError("the request is not a JSON object", kind="usage")
    nonce, root, protocol = fields.pop("nonce", None), fields.pop("root", None), fields.pop("protocol", None)
    if not isinstance(nonce, str) or not re.fullmatch(r"[0-9a-zA-Z_-]{1,128}", nonce):
        raise PayloadError("the request has no usable nonce", kind="usage")
    request = Request(nonce, root if isinstance(root, str) else "", fields)
    if protocol != PROTOCOL:
        raise UnansweredRequest(
            request,
            PayloadError(
                f"the caller speaks protocol {protocol!r}, this release speaks protocol {PROTOCOL}",
                hint="Deploy again, so that both ends are of the same version.",
                kind="usage",
            ),
        )
    if not request.root:
        raise UnansweredRequest(request, PayloadError("the request names no root", kind="usage"))
    return request


class UnansweredRequest(Exception):
    """A request that cannot be served, though its nonce is known."""

    def __init__(self, request: Request, error: PayloadError) -> None:
        super().__init__(error.message)
        self.request = request
        self.error = error


def serve(
    handler: Handler, *, outlive_caller: bool = False, heartbeat: Optional[Callable[[Events], None]] = None
) -> int:
    """Answer one request by ``handler``. Returns the exit status: 0 after a result, 1 after an error.

    ``handler`` takes (request, events) and returns the result; a PayloadError becomes the error line as it
    is, and anything else an error of kind ``failed`` with the traceback on stderr. ``heartbeat`` is called
    with the events before the handler starts.
    """
    descriptor = protect_stdout()
    try:
        request = read_request(sys.stdin.buffer)
    except UnansweredRequest as unanswered:
        return _refuse(Events(descriptor, unanswered.request.nonce), unanswered.error)
    except PayloadError as error:
        return _refuse(Events(descriptor, ""), error)
    events = Events(descriptor, request.nonce, outlive_caller)
    try:
        if heartbeat is not None:
            heartbeat(events)
        result = handler(request, events)
        events.send({"result": result})
    except CallerGone:
        return 1
    except PayloadError as error:
        return _refuse(events, error)
    except OSError as error:
        return _refuse(events, from_os_error(error))
    except Exception as error:  # noqa: BLE001 - the caller must get a final line whatever went wrong
        import traceback  # seldom needed, and every verb would wait for it

        traceback.print_exc()
        return _refuse(events, PayloadError(f"unexpected {type(error).__name__}: {error}"))
    return 0


def from_os_error(error: OSError) -> PayloadError:
    """What the operating system refused, in words of the protocol."""
    where = f": {error.filename}" if error.filename else ""
    message = f"{error.strerror or error}{where}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PayloadError(f"the container's disk is full ({message})", "Free some space, then try again.")
    return PayloadError(message)


def _refuse(events: Events, error: PayloadError) -> int:
    body = {"kind": error.kind, "message": error.message, "hint": error.hint}
    with contextlib.suppress(CallerGone):
        events.send({"error": body})
    return 1
