"""The account that the desk runs under. A machine may know neither its name nor its home, as in many containers."""

from __future__ import annotations

import getpass
import os
import pwd
from pathlib import Path

from orchestrator.errors import UsageError


def user_name() -> str:
    """The name of the user whose rights this process has; the number where the machine has no name for it."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def give_getpass_a_name() -> None:
    """Fabric and paramiko ask :func:`getpass.getuser`, which raises where there is no name: then it is the number."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = user_name()


def own_path(name: str | Path) -> Path:
    """``name`` with its ``~`` or ``~user`` replaced. Raises :class:`UsageError` when that has no home folder."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UsageError(
            f"{name}: the desk knows of no such home folder.", "Give the whole path, or set HOME."
        ) from None
