"""The commands that take one container or many: deploy, status, doctor.

One container is shown in full. Of many, each is a row as soon as it has answered, so that a host which does not
answer keeps nobody waiting for the others; the exit status is the worst.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from orchestrator.agent import Agent
from orchestrator.cli_options import (
    CtOption,
    HostOption,
    InventoryOption,
    JsonOption,
    RecipeOption,
    RunArgument,
    SetOption,
    open_container,
)
from orchestrator.console import Console, StepReport
from orchestrator.container import Container
from orchestrator.errors import OrchestratorError, RefusedError, UsageError
from orchestrator.fleet import Outcome, failure, on_each
from orchestrator.inventory import DEFAULT_INVENTORY, Destination, load_inventory

T = TypeVar("T")

AllOption = Annotated[
    bool, typer.Option("--all", help="Every container of the inventory, or of the host: HOST=all CT=all.")
]


def deploy(
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    everything: AllOption = False,
) -> None:
    """Bring the payload into the container, or into many, as one verified, content-named release."""
    from orchestrator.deploy import Deployed, Payload
    from orchestrator.deploy import deploy as deploy_release

    console = Console()
    payload = Payload()

    def row(deployed: Deployed) -> Sequence[object]:
        return deployed.release, "was there" if deployed.already_there else "sent"

    if many := _several(host, ct, inventory, everything):
        outcomes = _show_each(
            console,
            "deploy",
            many,
            lambda container: deploy_release(container, _silent_report(), payload),
            {"release": 16, "": 9},
            row,
        )
        _raise_worst(failure(outcomes, "`deploy`"))
        return
    with open_container(console, host, ct, inventory) as container, console.step("deploy") as report:
        report.outcome = "release " + " ".join(map(str, row(deploy_release(container, report, payload))))


def status(
    run: RunArgument = None,
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show the runs of the container, their state and their last metrics; of many, the newest run of each."""
    from orchestrator.status import OVERVIEW, overview, show_status
    from orchestrator.status import status as container_status

    console = Console()
    if many := _several(host, ct, inventory, everything):
        if run is not None:
            raise UsageError(
                f"A run is in one container: which one has {run}?", "Name it: HOST=<name> CT=<id>."
            )
        outcomes = _show_each(
            console,
            "status",
            many,
            lambda container: container_status(Agent.current(container)),
            OVERVIEW,
            overview,
            as_json=as_json,
        )
        _raise_worst(failure(outcomes, "`status`"))
        return
    with open_container(console, host, ct, inventory) as container:
        found = container_status(Agent.current(container), run)
    if as_json:
        console.json(found)
    else:
        show_status(console, found, container.destination.make_arguments)


def doctor(
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    recipe: RecipeOption = None,
    override: SetOption = None,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check whether the container is fit for a run of its recipe; each finding comes with its fix."""
    from orchestrator import doctor as step
    from orchestrator.deploy import Payload
    from orchestrator.recipes import resolve_recipe

    console = Console()

    def recipe_for(container: Container) -> Any:
        return resolve_recipe(container.settings, recipe, override or ())

    if many := _several(host, ct, inventory, everything):
        payload = Payload()
        outcomes = _show_each(
            console,
            "doctor",
            many,
            lambda container: step.examine(container, recipe_for(container), _silent_report(), payload),
            {"worst": 7, "checks": 40},
            lambda examined: (examined.worst, step.summary(examined.findings)),
            as_json=as_json,
            as_data=step.Examined.as_json,
        )
        unfit = [str(o.destination) for o in outcomes if o.result is not None and o.result.worst == "error"]
        _raise_worst(
            failure(outcomes, "`doctor`"),
            RefusedError(
                f"{len(unfit)} of {len(many)} containers are not fit for a run: {', '.join(unfit[:5])}.",
                "Each in full: make doctor HOST=<name> CT=<id>",
            )
            if unfit
            else None,
        )
        return
    with open_container(console, host, ct, inventory) as container:
        resolved = recipe_for(container)
        with console.step("doctor") as report:
            examined = step.examine(container, resolved, report)
            report.outcome = step.summary(examined.findings)
    if as_json:
        console.json(examined.as_json())
    else:
        step.show_findings(console, examined.findings)
    if examined.worst == "error":
        raise RefusedError(f"{container} is not fit for a run of {resolved.name}: {report.outcome}.")


def _several(host: str | None, ct: str | None, inventory: Path, everything: bool) -> list[Destination] | None:
    """The containers when more than one is meant, or may be; None for the one that HOST and CT name."""
    from orchestrator.targets import ALL, is_several, select

    if everything:
        host, ct = host or ALL, ALL
    return select(load_inventory(inventory), host, ct, inventory) if is_several(host, ct) else None


def _silent_report() -> StepReport:
    """For a step whose progress is not shown: of many, only what came of each is."""
    return StepReport(Console(quiet=True), "", None, None)


def _show_each(
    console: Console,
    name: str,
    destinations: Sequence[Destination],
    work: Callable[[Container], T],
    columns: dict[str, int],
    row: Callable[[T], Sequence[object]],
    *,
    as_json: bool = False,
    as_data: Callable[[T], Any] = lambda result: result,
) -> list[Outcome[T]]:
    """Do ``work`` on each container, show a row for each as it comes, or all of it as JSON, and return what came."""
    outcomes: list[Outcome[T]] = []
    widths = {
        "host": max(4, *(len(destination.host_name) for destination in destinations)),
        "ct": max(3, *(len(destination.container_id) for destination in destinations)),
        **columns,
    }
    began = time.monotonic()
    try:
        show = None if as_json else console.open_table(widths)
        for outcome in on_each(destinations, work, lambda text: console.line(f"  {text}")):
            outcomes.append(outcome)
            if show is not None:
                cells = (
                    (f"error: {outcome.error.message}",) if outcome.error else _row_of(outcome.result, row)
                )
                show((outcome.destination.host_name, outcome.destination.container_id, *cells))
    except KeyboardInterrupt:
        console.line(
            f"\ninterrupted: {len(outcomes)} of {len(destinations)} had answered. What was asked of the others may go "
            "on there; nothing half-done is used."
        )
        raise typer.Exit(130) from None
    failed = sum(outcome.error is not None for outcome in outcomes)
    console.line(
        f"{'!' if failed else '✓'} {name:<7} {len(outcomes)} container{'' if len(outcomes) == 1 else 's'}"
        f"{f', {failed} failed' if failed else ''} ({time.monotonic() - began:.1f} s)"
    )
    if as_json:
        console.json([_as_data(outcome, as_data) for outcome in _in_order(outcomes, destinations)])
    return outcomes


def _raise_worst(*errors: OrchestratorError | None) -> None:
    """Raise the one with the highest exit status, if there is one."""
    found = [error for error in errors if error is not None]
    if found:
        raise max(found, key=lambda error: error.exit_status)


def _row_of(result: T | None, row: Callable[[T], Sequence[object]]) -> Sequence[object]:
    return () if result is None else row(result)


def _in_order(outcomes: Sequence[Any], destinations: Sequence[Destination]) -> list[Any]:
    places = {(d.host_name, d.container_id): place for place, d in enumerate(destinations)}
    return sorted(outcomes, key=lambda o: places[o.destination.host_name, o.destination.container_id])


def _as_data(outcome: Any, as_data: Callable[[Any], Any]) -> dict[str, Any]:
    error = outcome.error
    return {
        "host": outcome.destination.host_name,
        "container": outcome.destination.container_id,
        "seconds": round(outcome.seconds, 3),
        "result": None if outcome.result is None else as_data(outcome.result),
        "error": None
        if error is None
        else {"message": error.message, "hint": error.hint, "exit_status": error.exit_status},
    }
