"""The payload's one base class of errors. Standard library only: the agent uses it before any venv exists."""

from __future__ import annotations


class PayloadError(Exception):
    """Something that a person can act on.

    ``message`` says what failed and where; ``hint`` says what to do next. ``kind`` is one of ``usage`` (the
    request was wrong), ``failed`` (the work did not succeed), ``refused`` (a check forbids it) and ``busy``
    (something else holds it).
    """

    def __init__(self, message: str, hint: str = "", kind: str = "failed") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class ToldToStopError(PayloadError):
    """The work ends because it was asked to; nothing failed."""
