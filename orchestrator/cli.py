"""The command line: which module a command is in, and what an error means to the shell.

A command's module is imported when it is asked for, so that a short command stays short.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from orchestrator.console import Console
from orchestrator.errors import OrchestratorError, RemoteError

COMMANDS = {
    "deploy": "orchestrator.cli_fleet",
    "venv": "orchestrator.cli_build",
    "warmup": "orchestrator.cli_build",
    "train": "orchestrator.cli_run",
    "logs": "orchestrator.cli_run",
    "status": "orchestrator.cli_fleet",
    "stop": "orchestrator.cli_run",
    "put": "orchestrator.cli_put",
    "fetch": "orchestrator.cli_run",
    "evaluate": "orchestrator.cli_evaluate",
    "estimate": "orchestrator.cli_estimate",
    "doctor": "orchestrator.cli_fleet",
    "probe": "orchestrator.cli_build",
    "script": "orchestrator.cli_script",
    "cache": "orchestrator.cli_cache",
    "prune": "orchestrator.cli_build",
    "locks": "orchestrator.cli_build",
    "node": "orchestrator.cli_node",
    "demo": "orchestrator.cli_node",
}
"""Each command's module, which holds it as a function of that name, or as ``<name>_app`` with commands of its own."""


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """What an import makes stays: to look for garbage among it, now and when the program ends, would take a tenth of a
    short command's time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _LazyGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        with _no_collection():
            module = import_module(COMMANDS[cmd_name])
        group = getattr(module, f"{cmd_name}_app", None)
        if group is None:
            group = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            group.command(cmd_name)(getattr(module, cmd_name))
        command = typer.main.get_command(group)
        command.name = cmd_name
        return command


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _commands() -> None:
    """Train DFlash drafters in LXC containers on Proxmox hosts, from your desk."""


def main() -> None:
    """The console script: errors become one paragraph and an exit status."""
    # A caller may have closed either: then what would be shown has nowhere to go, and the work is done all the same.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - for the rest of the process
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    try:
        app()
    except OrchestratorError as error:
        Console().error(error)
        sys.exit(error.exit_status)
    except BrokenPipeError:
        # The reader of standard output is gone (`logs | head`): nothing is wrong, and nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        Console().error(
            RemoteError(f"The desk could not go on: {error}.", "Nothing in the container is harmed by that.")
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
