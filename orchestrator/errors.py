"""What can go wrong for a person at the desk. One tree; the class alone decides the exit status.

========  =====================================================================
status    meaning
========  =====================================================================
1         the remote command, or the job, failed (:class:`RemoteError`)
2         the request or the inventory is wrong (:class:`UsageError`)
3         the host or container could not be reached, or the link broke (:class:`TransportError`)
4         a check forbids it: a mismatched pin, a second job (:class:`RefusedError`)
========  =====================================================================
"""

from __future__ import annotations


class OrchestratorError(Exception):
    """Something failed in a way that a person can act on.

    ``message`` says what failed and where; ``hint`` says what to do next.
    """

    exit_status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class RemoteError(OrchestratorError):
    """The container was reached, and what was asked of it failed there."""


class UsageError(OrchestratorError):
    """The command line, the inventory or a recipe asks for something that cannot be."""

    exit_status = 2


class TransportError(OrchestratorError):
    """The host or its container did not answer, or the link broke before the answer was whole."""

    exit_status = 3


class LinkLost(TransportError):
    """The link broke, or the host fell silent, with something under way. What may be repeated may be tried again."""


class RefusedError(OrchestratorError):
    """A check forbids going on: a pin that does not match, a job that already runs."""

    exit_status = 4
