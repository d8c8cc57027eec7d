"""Where a recipe's relative paths lead: below the container's root, whichever module asks and from which folder."""

from __future__ import annotations

import os
from pathlib import Path

from payload.errors import PayloadError

ROOT_VARIABLE = "DFLASH_ROOT"
"""Set by the agent for everything that it runs in a venv."""


def at_home(name: str) -> Path:
    """``name`` with its ``~`` expanded; as in a shell, that of a user that there is not stays as it is."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def place(name: str) -> Path:
    """The path that ``name`` of a recipe means: absolute as it is, ``~`` expanded, else below the container's root.

    Outside a container, where no root is set, a relative name is relative to the working folder.
    """
    path = at_home(name)
    root = os.environ.get(ROOT_VARIABLE)
    return path if path.is_absolute() or not root else Path(root) / path


def is_surely_a_folder(name: str) -> bool:
    """Whether the target ``name`` of a recipe can be no name of the hub: ``./x``, ``/x``, ``~/x``, ``a/b/c``."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def place_or_hub_name(name: str) -> str:
    """``name`` as transformers takes it: the folder that it means when there is one, else as it is, a hub's name.

    Raises PayloadError (kind ``usage``) for what can only be a folder (:func:`is_surely_a_folder`) and is none.
    """
    folder = place(name)
    if folder.is_dir():
        return str(folder)
    if is_surely_a_folder(name):
        raise PayloadError(
            f"there is no folder {folder}",
            "Put the model there, or name another: target.model=<folder>.",
            kind="usage",
        )
    return name
