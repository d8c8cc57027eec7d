"""The controller's side of the agent protocol: one JSON request in, JSON lines out, one final line.

A verb without its final line has failed on the way, whatever the exit status says: ``pct`` and ``lxc-attach`` have
exit statuses of their own, and so has SSH.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from orchestrator.answers import understood
from orchestrator.command import Completed
from orchestrator.container import Container
from orchestrator.desk_account import user_name
from orchestrator.errors import (
    LinkLost,
    OrchestratorError,
    RefusedError,
    RemoteError,
    TransportError,
    UsageError,
)
from orchestrator.retry import repeat

PROTOCOL = 1
LINE_LIMIT_BYTES = 8 * 1024 * 1024
_MOST_NESTED = 64
"""Objects and lists in each other. No answer needs a tenth of it, and what shows one goes down into it."""
IDLE_TIMEOUT_S = 60.0
"""Every verb that takes long sends progress or an ``alive`` event well within this."""

ISOLATED = ("-I", "-S", "-B")
"""The agent needs the standard library alone: no environment, and no site-packages, which may cost tens of
milliseconds to look at. Its bytecode lies beside it since it was put in place; on a full disk, writing it breaks it."""

REPEATABLE_VERBS = frozenset({"hello", "status", "facts", "files", "stop"})
"""Those that only ask, or do the same thing however often."""

COMMAND_NOT_FOUND = 127
"""What env(1) exits with for a program that is not there."""

_MAKE_COMMAND = re.compile(
    r"\bmake (?:deploy|venv|warmup|train|logs|status|stop|fetch|evaluate|put|prune|locks|cache)\b(?! HOST=)"
)

T = TypeVar("T")
Event = dict[str, Any]
OnEvent = Callable[[Event], None]

_ERRORS: dict[str, type[OrchestratorError]] = {
    "usage": UsageError,
    "failed": RemoteError,
    "refused": RefusedError,
    "busy": RefusedError,
}


class NoAnswer(TransportError):
    """The verb ended without a final line that bears the request's nonce."""


class Agent:
    """The agent of one release in one container."""

    def __init__(self, container: Container, program: str) -> None:
        """``program`` is the agent's folder in the container, or an archive that holds it."""
        self.container = container
        self.program = program

    @classmethod
    def of_release(cls, container: Container, release: str) -> Agent:
        return cls(container, f"{container.settings.root}/releases/{release}/payload/agent")

    @classmethod
    def current(cls, container: Container) -> Agent:
        """The agent of whatever release is deployed: for looking at a container, not for changing it."""
        return cls(container, f"{container.settings.root}/current/payload/agent")

    def ask(
        self,
        shape: type[T],
        verb: str,
        request: Mapping[str, Any] | None = None,
        *,
        on_event: OnEvent = lambda _: None,
        timeout_s: float | None = None,
        idle_timeout_s: float | None = IDLE_TIMEOUT_S,
    ) -> T:
        """Ask as :meth:`call` does for an answer that is read: a ``shape`` of :mod:`orchestrator.answers`.

        Raises :class:`orchestrator.answers.NotUnderstood` for any other.
        """
        answer = self.call(
            verb, request, on_event=on_event, timeout_s=timeout_s, idle_timeout_s=idle_timeout_s
        )
        asked = str((request or {}).get("module", verb))
        return understood(shape, answer, self.container, asked)

    def call(
        self,
        verb: str,
        request: Mapping[str, Any] | None = None,
        *,
        on_event: OnEvent = lambda _: None,
        timeout_s: float | None = None,
        idle_timeout_s: float | None = IDLE_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Ask ``verb`` of the agent and return its result as it came, which nobody has looked at.

        ``on_event`` takes each event as it comes. A verb that may be repeated is, when the link breaks. Raises what
        the agent's error says (see :mod:`orchestrator.errors`), :class:`NoAnswer` when there was no final line, and
        :class:`orchestrator.errors.TransportError`.
        """

        def ask() -> dict[str, Any]:
            return self._ask(verb, request or {}, on_event, timeout_s, idle_timeout_s)

        if verb in REPEATABLE_VERBS:
            return repeat(ask, f"to ask for `{verb}`", self.container.connection.notify)
        return ask()

    def _ask(
        self,
        verb: str,
        request: Mapping[str, Any],
        on_event: OnEvent,
        timeout_s: float | None,
        idle_timeout_s: float | None,
    ) -> dict[str, Any]:
        nonce = secrets.token_hex(16)
        envelope = {
            **request,
            "protocol": PROTOCOL,
            "nonce": nonce,
            "root": self.container.settings.root,
            "holder": f"{user_name()}@{socket.gethostname()}",
        }
        replies = _Replies(nonce, on_event)
        done = None
        try:
            done = self.container.run(
                [self.container.settings.python, *ISOLATED, self.program, verb],
                stdin=json.dumps(envelope).encode() + b"\n",
                on_stdout=replies.feed,
                timeout_s=timeout_s,
                idle_timeout_s=idle_timeout_s,
            )
        except LinkLost:
            # An answer that came is one, whatever became of the link after it.
            if replies.result is None and replies.error is None:
                raise
        if replies.result is not None:
            return replies.result
        if replies.error is not None or done is None:
            self._raise(verb, replies.error or {})
        if _is_missing(done):
            # Python's own words: the container runs, so there is nothing to ask of the host.
            raise NoAnswer(
                f"{self.container}: no release answers `{verb}` there.", self._no_answer_hint(done)
            )
        reason = self.container.explain(done, f"the agent gave no answer to `{verb}`")
        if isinstance(reason, RemoteError):
            raise NoAnswer(reason.message, self._no_answer_hint(done))
        raise reason

    def _raise(self, verb: str, error: Mapping[str, Any]) -> NoReturn:
        kind = _ERRORS.get(str(error.get("kind")), RemoteError)
        message = str(error.get("message") or f"`{verb}` failed without saying why")
        hint = _completed(str(error.get("hint") or ""), self.container.destination.make_arguments)
        raise kind(f"{self.container}: {message}", hint)

    def _no_answer_hint(self, done: Completed) -> str:
        if _is_missing(done):
            return (
                f"Nothing is deployed under {self.container.settings.root} yet: "
                f"make deploy {self.container.destination.make_arguments}"
            )
        if done.exit_status == COMMAND_NOT_FOUND:
            python = self.container.settings.python
            return f"The container needs Python 3.9 or newer as {python} (`python:` in the inventory)."
        return "Look into the container with `pct enter`, or try again."


def _completed(hint: str, place: str) -> str:
    """An agent's hint with its container in each command of make, which only the desk can name."""
    return _MAKE_COMMAND.sub(lambda command: f"{command[0]} {place}", hint)


def _is_missing(done: Completed) -> bool:
    """Whether Python ran and found no agent where it should be."""
    stderr = done.stderr_text()
    return "can't open file" in stderr or "can't find '__main__' module" in stderr


class _Replies:
    """Splits the agent's output into lines and keeps those that bear the nonce."""

    def __init__(self, nonce: str, on_event: OnEvent) -> None:
        self._nonce = nonce
        self._on_event = on_event
        self._tail = bytearray()
        self.result: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None

    def feed(self, data: bytes) -> None:
        self._tail += data
        if b"\n" not in data:
            if len(self._tail) > LINE_LIMIT_BYTES:
                raise TransportError(
                    f"The agent sent a line of more than {LINE_LIMIT_BYTES >> 20} MiB.",
                    "Deploy again, then try again.",
                )
            return
        *lines, rest = bytes(self._tail).split(b"\n")
        self._tail = bytearray(rest)
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(reply, dict) or reply.get("nonce") != self._nonce or _nests_deeply(reply):
            return
        if self.result is not None or self.error is not None:
            return
        if isinstance(reply.get("result"), dict):
            self.result = reply["result"]
        elif isinstance(reply.get("error"), dict):
            self.error = reply["error"]
        elif "event" in reply:
            self._on_event(reply)


def _nests_deeply(value: Any) -> bool:
    level = [value]
    for _ in range(_MOST_NESTED):
        inner = (part for outer in level for part in (outer.values() if isinstance(outer, dict) else outer))
        level = [part for part in inner if isinstance(part, (dict, list))]
        if not level:
            return False
    return True
