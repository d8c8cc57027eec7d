"""Names that a container tells: none becomes part of a path at the desk before it was looked at here."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath

from orchestrator.errors import RemoteError

RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What the agent may call a run: one part of a path, and neither ``.`` nor ``..``."""
FINGERPRINT = re.compile(r"[0-9a-f]{16}")
"""The name of a compile cache."""

_HINT = "Nothing was written. Whoever runs that container can say why its agent answers so."


def told_name(name: object, pattern: re.Pattern[str], what: str, container: object) -> str:
    """``name`` as ``container`` told it. Raises :class:`RemoteError` when it is none of a ``what``."""
    if not isinstance(name, str) or not pattern.fullmatch(name):
        raise RemoteError(
            f"{container} tells of a {what} {str(name)[:100]!r}, which is no name of one.", _HINT
        )
    return name


def told_path(path: object, container: object) -> PurePosixPath:
    """A file's path below a run's folder. Raises :class:`RemoteError` when it leads out of it, or is no path."""
    told = PurePosixPath(str(path))
    try:
        encoded = os.fsencode(told)
    except UnicodeEncodeError:
        encoded = b"\0"
    if told.is_absolute() or ".." in told.parts or not told.parts or b"\0" in encoded:
        raise RemoteError(f"{container} lists a file outside the run: {str(told)[:200]!r}.", _HINT)
    return told
