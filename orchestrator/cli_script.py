"""The command `orchestrator script`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.agent import Agent
from orchestrator.cli_options import CtOption, HostOption, InventoryOption, open_container
from orchestrator.console import Console, LogWriter
from orchestrator.errors import RemoteError, UsageError
from orchestrator.inventory import DEFAULT_INVENTORY
from orchestrator.script import run_script


def script(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A program of the desk, with a #! line.")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...")] = None,
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    venv: Annotated[
        bool, typer.Option("--venv", help="With the venv in use: its python3, its torch.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0.1, metavar="SECONDS", help="End it, with all it started."),
    ] = None,
) -> None:
    """Run a file of the desk in the container: it travels as a file, so nothing in it is ever quoted."""
    if file is None:
        raise UsageError("No file is named.", "Name a program of the desk with a #! line: FILE=probe.py.")
    streams = {
        "stdout": LogWriter(sys.stdout.buffer, is_terminal=sys.stdout.isatty()),
        "stderr": LogWriter(sys.stderr.buffer, is_terminal=sys.stderr.isatty()),
    }
    with open_container(Console(), host, ct, inventory) as container:
        status = run_script(
            Agent.current(container),
            file,
            arguments or (),
            lambda stream, data: streams.get(stream, streams["stderr"]).write(data),
            in_venv=venv,
            timeout_s=timeout,
        )
    if status != 0:
        raise RemoteError(f"{file} ended with exit status {status} in {container}.")
