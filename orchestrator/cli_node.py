"""The commands of `orchestrator node`. The SSH server is imported inside them: it would double every other start."""

from __future__ import annotations

import typer

from orchestrator.cli_options import DEFAULT_NODE, StateOption
from orchestrator.console import Console
from orchestrator.inventory import from_here

node_app = typer.Typer(
    no_args_is_help=True, help="The embedded node: an SSH server and a pct on this machine."
)


@node_app.command("start")
def node_start(state: StateOption = DEFAULT_NODE) -> None:
    """Start the embedded node and leave it running; prints how to use it."""
    from orchestrator.localnode import node

    console = Console()
    with console.step("node") as report:
        info = node.start(state)
        report.outcome = f"{info.address}:{info.port}, container {info.containers[0]}"
    console.line(
        f"Use it: make status HOST=local CT={info.containers[0]} INVENTORY={from_here(info.inventory)}"
    )


@node_app.command("stop")
def node_stop(state: StateOption = DEFAULT_NODE) -> None:
    """Stop the embedded node and what runs in its containers; its files stay."""
    from orchestrator.localnode import node

    console = Console()
    with console.step("node") as report:
        report.outcome = "stopped" if node.stop(state) else "was not running"


@node_app.command("status")
def node_status(state: StateOption = DEFAULT_NODE) -> None:
    """Say whether the embedded node runs, and where."""
    from orchestrator.localnode import node

    console = Console()
    info = node.status(state)
    if info is None:
        console.line(f"No node runs from {state}. Start it: orchestrator node start")
        raise typer.Exit(1)
    console.line(f"{info.address}:{info.port}, inventory {info.inventory}")
