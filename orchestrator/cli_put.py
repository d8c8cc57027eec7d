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


def put(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A file or a folder of the desk.")],
    to: Annotated[
        str, typer.Option("--to", metavar="PATH", help="Where it goes, relative to the container's root.")
    ],
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
) -> None:
    """Bring rows, prompts or a target's folder into the container; what is there already is not sent again."""
    console = Console()
    if source == Path():
        raise UsageError(
            "No file is named.", "Give a file or a folder by its name: FILE= (`.` would be everything here)."
        )
    with open_container(console, host, ct, inventory) as container, console.step("put") as report:
        placed = put_files(container, source, to, report)
        report.outcome = (
            f"{placed.sent} {'file' if placed.sent == 1 else 'files'}, {placed.sent_bytes / 1e6:.1f} MB sent to {to}"
            + (f"; {placed.already_there} were there" if placed.already_there else "")
        )
