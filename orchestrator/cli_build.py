"""The commands that build up a container and look into it: venv, warmup, prune, locks, probe."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.agent import Agent
from orchestrator.answers import Locks, Pruned
from orchestrator.cli_options import (
    CtOption,
    HostOption,
    InventoryOption,
    JsonOption,
    RecipeOption,
    SetOption,
    WheelhouseOption,
    deployed_release,
    open_container,
    open_step,
)
from orchestrator.console import Console, size_text
from orchestrator.errors import UsageError
from orchestrator.inventory import DEFAULT_INVENTORY
from orchestrator.probe import probe as probe_container
from orchestrator.probe import show_probe
from orchestrator.prune import remove_data, remove_runs, show_removed_data, show_removed_runs
from orchestrator.recipes import resolve_recipe
from orchestrator.venv import build_venv
from orchestrator.warmup import warm_up
from payload.agent.run_data import KINDS


def venv(
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    wheelhouse: WheelhouseOption = False,
    force: Annotated[
        bool, typer.Option("--force", help="Build anew even when the pinned venv is there.")
    ] = False,
) -> None:
    """Build the pinned venv beside the old one, verify it, and switch to it. The compile cache stays."""
    console = Console()
    with open_step("venv", console, host, ct, inventory) as (agent, report):
        built = build_venv(agent.container, agent, report, wheelhouse=wheelhouse, force=force)
        report.outcome = f"venv {built.venv}, torch {built.torch_version} (git {built.torch_git[:10]})" + (
            " built" if built.created else " was there"
        )


def warmup(
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    recipe: RecipeOption = None,
    override: SetOption = None,
    prove: Annotated[
        bool, typer.Option("--prove", help="Run a second process that must miss nothing.")
    ] = False,
) -> None:
    """Compile what training will call, into the cache that belongs to this torch, GPU and recipe."""
    console = Console()
    with open_container(console, host, ct, inventory) as container:
        resolved = resolve_recipe(container.settings, recipe, override or ())
        release = deployed_release(container, console)
        agent = Agent.of_release(container, release)
        with console.step("venv") as report:
            built = build_venv(container, agent, report)
            report.outcome = f"venv {built.venv}"
        with console.step("warmup") as report:
            warmed = warm_up(agent, report, release=release, venv=built.venv, recipe=resolved, prove=prove)
            report.outcome = str(warmed)


def prune(
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    keep: Annotated[
        int, typer.Option("--keep", min=0, help="How many of each to keep besides what is pinned.")
    ] = 2,
    keep_runs: Annotated[
        int | None,
        typer.Option("--keep-runs", min=0, help="Runs too, but for the newest N and what they need."),
    ] = None,
    runs: Annotated[
        list[str] | None, typer.Option("--run", metavar="RUN", help="This run too. May be repeated.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="KIND",
            help=f"{', '.join(KINDS)} or all that no run goes on with or can be resumed with. May be repeated.",
        ),
    ] = None,
    apply: Annotated[
        bool,
        typer.Option(
            "--apply", help="Remove those runs and data; else they are only shown, and nothing is removed."
        ),
    ] = False,
) -> None:
    """Remove releases, venvs and uploads that no run pins and nothing uses; when told to, runs and data first.

    A run goes with its checkpoints, metrics and log. Data are the target's answers to prompts, encoded training sets
    and offline features, which a later run makes again. Compile caches stay: `cache prune`.
    """
    console = Console()
    if keep_runs is not None and runs:
        raise UsageError(
            "--keep-runs and --run were given.", "Name runs (RUN_ID=), or how many to keep (RUNS=)."
        )
    unknown = [kind for kind in data or () if kind not in (*KINDS, "all")]
    if unknown:
        raise UsageError(f"There are no data called {unknown[0]}.", f"It is {', '.join(KINDS)} or all.")
    with open_step("prune", console, host, ct, inventory) as (agent, report):
        gone, run_ids = [], list[str]()
        if keep_runs is not None or runs:
            found = remove_runs(agent, report, keep=keep_runs, run_ids=runs, apply=apply)
            show_removed_runs(console, found)
            run_ids = [run["run_id"] for run in found["runs"]]
            gone.append(_counted(len(run_ids), "run", sum(run["bytes"] for run in found["runs"])))
        if data:
            kinds = KINDS if "all" in data else data
            removed_data = remove_data(agent, report, kinds=kinds, gone=run_ids, apply=apply)
            show_removed_data(console, removed_data)
            items = removed_data["data"]
            gone.append(_counted(len(items), "data set", sum(item["bytes"] for item in items)))
        if gone and not apply:
            report.outcome = f"would remove {' and '.join(gone)}; nothing was. Remove: APPLY=1 (--apply)"
            return
        removed = agent.ask(Pruned, "prune", {"keep": keep}, on_event=report.on_event)["removed"]
        if removed or not gone:
            gone.append(f"{len(removed)}: {', '.join(removed) or 'nothing was left over'}")
        report.outcome = f"removed {' and '.join(gone)}"


def _counted(count: int, what: str, size_bytes: int) -> str:
    return f"{count} {what}{'' if count == 1 else 's'} ({size_text(size_bytes)})"


def locks(
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    broken: Annotated[
        str | None, typer.Option("--break", metavar="LOCK", help="End the process that holds this one.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show who is changing the container, and for how long; end one that hangs. What it was making is not used."""
    console = Console()
    # Of the release that is there: a hanging deploy would hold up another.
    with open_container(console, host, ct, inventory) as container, console.step("locks") as report:
        agent = Agent.current(container)
        found = agent.ask(Locks, "locks", {"break": broken}, on_event=report.on_event)
        ended = f"ended the holder of {broken}; " if broken else ""
        report.outcome = f"{ended}{len(found['locks'])} held"
    if as_json:
        console.json(found)
    elif found["locks"]:
        rows = [
            (lock["name"], lock["holder"], f"{lock['age_s']:.0f} s", lock["verb"], lock["pid"])
            for lock in found["locks"]
        ]
        console.table(("lock", "held by", "for", "verb", "pid"), rows)


def probe(
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    as_json: JsonOption = False,
) -> None:
    """Show what the container, its torch and its flex_attention really are."""
    console = Console()
    with open_step("probe", console, host, ct, inventory) as (agent, report):
        found = probe_container(agent, report)
        report.outcome = str(agent.container)
    if as_json:
        console.json(found)
    else:
        show_probe(console, found)
