"""What the commands share: their options, and a container or step to work in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.agent import Agent
from orchestrator.connection import Connection
from orchestrator.console import Console, StepReport
from orchestrator.container import Container
from orchestrator.errors import UsageError
from orchestrator.inventory import known_destinations, load_inventory, resolve
from orchestrator.localnode.layout import DEFAULT_STATE
from orchestrator.targets import is_several

DEFAULT_NODE = Path(DEFAULT_STATE)

HostOption = Annotated[
    str | None,
    typer.Option(
        "--host",
        envvar="DFLASH_HOST",
        help="A host of the inventory, or a plain IP address; `status`, `deploy` and `doctor` take a,b and all.",
    ),
]
CtOption = Annotated[
    str | None,
    typer.Option(
        "--ct", envvar="DFLASH_CT", help="The container's id on that host; also 200,210-217 and all there."
    ),
]
InventoryOption = Annotated[
    Path, typer.Option("--inventory", envvar="DFLASH_INVENTORY", help="The inventory file.")
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe", envvar="DFLASH_RECIPE", help="A recipe's name or file; else the container's own."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override one value of the recipe: train.steps=100. May be repeated."),
]
WheelhouseOption = Annotated[
    bool,
    typer.Option("--wheelhouse", help="Send every wheel from the desk: for a container without internet."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON value on standard output.")]
RunArgument = Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run id; else the newest run.")]
FingerprintArgument = Annotated[str, typer.Argument(metavar="FINGERPRINT", help="Its name in `cache list`.")]
StateOption = Annotated[
    Path, typer.Option("--state", envvar="DFLASH_NODE", help="The embedded node's folder.")
]


@contextlib.contextmanager
def open_container(
    console: Console, host: str | None, ct: str | None, inventory: Path
) -> Iterator[Container]:
    known = load_inventory(inventory)
    if is_several(host, ct):
        named = " ".join(f"{name}={value}" for name, value in (("HOST", host), ("CT", ct)) if value)
        raise UsageError(
            f"{named} may mean several containers, and this command works on one.",
            f"{inventory} knows {known_destinations(known)}: HOST=<name> CT=<id>. Several: deploy, status, doctor.",
        )
    destination = resolve(known, host, ct, inventory)
    try:
        with Connection(destination.host_name, destination.host, console.line) as connection:
            yield Container(connection, destination)
    except KeyboardInterrupt:
        console.line(
            f"\ninterrupted. What was asked of {destination} may go on there; nothing half-done is used. "
            f"Look: make locks {destination.make_arguments}"
        )
        raise typer.Exit(130) from None


@contextlib.contextmanager
def open_step(
    name: str, console: Console, host: str | None, ct: str | None, inventory: Path
) -> Iterator[tuple[Agent, StepReport]]:
    """A step on a container that has the desk's release: its agent, and the line to report on."""
    with (
        open_container(console, host, ct, inventory) as container,
        deployed_step(name, console, container) as step,
    ):
        yield step


@contextlib.contextmanager
def deployed_step(name: str, console: Console, container: Container) -> Iterator[tuple[Agent, StepReport]]:
    """The same on a container that is open already: what can be refused before anything is brought there was."""
    agent = Agent.of_release(container, deployed_release(container, console))
    with console.step(name) as report:
        yield agent, report


def deployed_release(container: Container, console: Console) -> str:
    """The desk's own release, deployed when it is missing."""
    from orchestrator.deploy import deploy  # what only looks needs none of it

    with console.step("deploy") as report:
        deployed = deploy(container, report)
        report.outcome = f"release {deployed.release}" + (" was there" if deployed.already_there else " sent")
    return deployed.release
