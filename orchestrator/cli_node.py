"""The commands `orchestrator node …`, and `demo`, which runs on that node."""

from __future__ import annotations

import typer

from orchestrator.cli_options import DEFAULT_NODE, StateOption
from orchestrator.console import Console
from orchestrator.demo import run_demo
from orchestrator.inventory import from_here
from orchestrator.localnode import node

node_app = typer.Typer(
    no_args_is_help=True, help="The embedded node: an SSH server and a pct on this machine."
)


@node_app.command("start")
def node_start(state: StateOption = DEFAULT_NODE) -> None:
    """Start the embedded node and leave it running; prints how to use it."""
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
    console = Console()
    with console.step("node") as report:
        report.outcome = "stopped" if node.stop(state) else "was not running"


@node_app.command("status")
def node_status(state: StateOption = DEFAULT_NODE) -> None:
    """Say whether the embedded node runs, and where."""
    console = Console()
    info = node.status(state)
    if info is None:
        console.line(f"No node runs from {state}. Start it: orchestrator node start")
        raise typer.Exit(1)
    console.line(f"{info.address}:{info.port}, inventory {info.inventory}")


def demo(state: StateOption = DEFAULT_NODE) -> None:
    """Run the whole story on the embedded node: deploy, venv, warmup, train, fetch, and show what was learned."""
    run_demo(Console(), state)
