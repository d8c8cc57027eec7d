"""The command `orchestrator put`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli_options import CtOption, HostOption, InventoryOption, open_container
from orchestrator.console import Console
from orchestrator.errors import UsageError
from orchestrator.inventory import DEFAULT_INVENTORY
from orchestrator.put import put as put_files

MOST_NAMES = 5
"""Names of what is left in the container that a message shows."""


def put(
    source: Annotated[
        Path | None, typer.Argument(metavar="SOURCE", help="A file or a folder of the desk.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="PATH", help="Where it goes, relative to the container's root."),
    ] = None,
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove what lies in the folder there and is not in SOURCE.")
    ] = False,
) -> None:
    """Bring rows, prompts or a target's folder into the container; what is there already is not sent again."""
    console = Console()
    if source is None or source == Path():
        raise UsageError(
            "No file is named.", "Give a file or a folder by its name: FILE= (`.` would be everything here)."
        )
    if to is None:
        raise UsageError(
            f"Where {source} goes is not said.",
            "Name a place below the container's root: TO=data/train.jsonl (--to).",
        )
    with open_container(console, host, ct, inventory) as container, console.step("put") as report:
        placed = put_files(container, source, to, report, delete=delete)
        others = len(placed.others)
        if others and not placed.removed:
            shown = " ".join(", ".join(placed.others[:MOST_NAMES]).split()) + (
                ", …" if others > MOST_NAMES else ""
            )
            report.note(
                f"{_count(others)} below {to} {'is' if others == 1 else 'are'} not in {source} and "
                f"{'stays' if others == 1 else 'stay'}: {shown}. Remove: DELETE=1 (--delete)"
            )
        report.outcome = (
            f"{_count(placed.sent)}, {placed.sent_bytes / 1e6:.1f} MB sent to {to}"
            + (
                f"; {placed.already_there} {_were(placed.already_there)} there"
                if placed.already_there
                else ""
            )
            + (
                f"; {others} that {_were(others)} not in {source} removed"
                if others and placed.removed
                else ""
            )
        )


def _count(files: int) -> str:
    return f"{files} file{'' if files == 1 else 's'}"


def _were(files: int) -> str:
    return "was" if files == 1 else "were"
