"""Credentials in URLs: found, and kept out of what is shown or stored."""

from __future__ import annotations

import re

# Greedy: a password may hold an @ that nobody has encoded.
_CREDENTIALS = re.compile(r"://[^/\s]+@")


def redact(text: str) -> str:
    """``text`` without the credentials of its URLs."""
    return _CREDENTIALS.sub("://***@", text)
