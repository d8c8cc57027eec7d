"""The commands: parse, call one step, show what came of it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.agent import Agent
from orchestrator.checks import worst
from orchestrator.cli_cache import cache_app
from orchestrator.cli_evaluate import evaluate
from orchestrator.cli_node import node_app
from orchestrator.cli_options import (
    DEFAULT_NODE,
    CtOption,
    HostOption,
    InventoryOption,
    JsonOption,
    RecipeOption,
    RunArgument,
    SetOption,
    StateOption,
    WheelhouseOption,
    deployed_release,
    open_container,
    open_step,
)
from orchestrator.console import Console, LogWriter
from orchestrator.container import Container
from orchestrator.deploy import deploy as deploy_release
from orchestrator.doctor import as_json as findings_as_json
from orchestrator.doctor import examine, show_findings, summary
from orchestrator.errors import OrchestratorError, RefusedError, RemoteError, UsageError
from orchestrator.fetch import fetch as fetch_run
from orchestrator.inventory import DEFAULT_INVENTORY
from orchestrator.logs import LogEnd, show_logs
from orchestrator.probe import probe as probe_container
from orchestrator.probe import show_probe
from orchestrator.recipes import resolve_recipe
from orchestrator.records import RUN_ID
from orchestrator.status import newest_run, show_status
from orchestrator.status import status as container_status
from orchestrator.status import stop as stop_run
from orchestrator.train import prepare, start_job
from orchestrator.venv import build_venv
from orchestrator.warmup import warm_up

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train DFlash drafters in LXC containers on Proxmox hosts, from your desk.",
)
app.add_typer(node_app, name="node")
app.add_typer(cache_app, name="cache")
app.command()(evaluate)


@app.command()
def deploy(
    host: HostOption = None, ct: CtOption = None, inventory: InventoryOption = DEFAULT_INVENTORY
) -> None:
    """Bring the payload into the container as one verified, content-named release."""
    console = Console()
    with open_container(console, host, ct, inventory) as container, console.step("deploy") as report:
        deployed = deploy_release(container, report)
        report.outcome = f"release {deployed.release}" + (" was there" if deployed.already_there else " sent")


@app.command()
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


@app.command()
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
        release = agent.call("hello", {"release": None})["release"]
        with console.step("warmup") as report:
            warmed = warm_up(
                agent, report, release=str(release), venv=built.venv, recipe=resolved, prove=prove
            )
            report.outcome = str(warmed)


@app.command()
def train(
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    recipe: RecipeOption = None,
    override: SetOption = None,
    wheelhouse: WheelhouseOption = False,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN", help="Go on from the newest checkpoint of that run."),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Start the job and return at once.")] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Skip warmup: the first step compiles, and may race.")
    ] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Go on where the checks of `doctor` found errors.")
    ] = False,
) -> None:
    """Do what is missing of the steps before, start the job once, detached, and follow its log. Ctrl-C detaches."""
    console = Console()
    with open_container(console, host, ct, inventory) as container:
        resolved = resolve_recipe(container.settings, recipe, override or ())
        if resume is not None and not RUN_ID.fullmatch(resume):
            raise UsageError(f"--resume {resume}: not a run id.", "`status` lists the runs of a container.")
        prepared = prepare(container, resolved, console, wheelhouse=wheelhouse, cold=cold, anyway=anyway)
        run_id = start_job(container, prepared, resolved, console, resume=resume)
        if detach:
            console.line(_attach_hint(container, run_id))
            return
        _follow(console, container, prepared.agent, run_id)


@app.command()
def logs(
    run: RunArgument = None,
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run is over.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", min=0, help="Only the last N lines.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Only the last while: 90s, 10m, 2h, 1d.")
    ] = None,
) -> None:
    """Show a run's output as it is in the container."""
    console = Console()
    since_s = _seconds(since)
    with open_container(console, host, ct, inventory) as container:
        agent = Agent.current(container)
        if follow:
            _follow(console, container, agent, run, tail=tail, since_s=since_s)
        else:
            show_logs(agent, _log_writer().write, run_id=run, tail_lines=tail, since_s=since_s)


@app.command()
def status(
    run: RunArgument = None,
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    as_json: JsonOption = False,
) -> None:
    """Show the container's runs, their state and their last metrics."""
    console = Console()
    with open_container(console, host, ct, inventory) as container:
        found = container_status(Agent.current(container), run)
    if as_json:
        console.json(found)
    else:
        show_status(console, found)


@app.command()
def stop(
    run: RunArgument = None,
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    grace: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds between the asking and the killing.")
    ] = 30.0,
) -> None:
    """End a run: its processes are asked, then killed; the command ends when none is left."""
    console = Console()
    with open_container(console, host, ct, inventory) as container:
        agent = Agent.current(container)
        run_id = run or newest_run(agent, active=True)
        with console.step("stop") as report:
            ended = stop_run(agent, run_id, report, grace_s=grace)
            report.outcome = f"run {run_id} is {ended['state']}"


@app.command()
def fetch(
    run: RunArgument = None,
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    to: Annotated[Path, typer.Option("--to", help="The folder that gets <run id>/.")] = Path("runs"),
) -> None:
    """Bring a run's metrics, log and complete checkpoints home, each verified by hash."""
    console = Console()
    with open_container(console, host, ct, inventory) as container:
        agent = Agent.current(container)
        run_id = run or newest_run(agent)
        with console.step("fetch") as report:
            fetched = fetch_run(container, agent, run_id, to, report)
            report.outcome = (
                f"{fetched.files} files in {fetched.folder}, {fetched.new_files} of them new "
                f"({fetched.size_bytes / 1e6:.1f} MB)"
            )


@app.command()
def prune(
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    keep: Annotated[
        int, typer.Option("--keep", min=0, help="How many of each to keep besides what is pinned.")
    ] = 2,
) -> None:
    """Remove releases, venvs and uploads that no run pins and nothing uses. Runs and compile caches stay."""
    console = Console()
    with open_step("prune", console, host, ct, inventory) as (agent, report):
        removed = agent.call("prune", {"keep": keep}, on_event=report.on_event)["removed"]
        report.outcome = f"removed {len(removed)}: {', '.join(removed) or 'nothing was left over'}"


@app.command()
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


@app.command()
def doctor(
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    recipe: RecipeOption = None,
    override: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check whether the container is fit for a run of its recipe; each finding comes with its fix."""
    console = Console()
    with open_container(console, host, ct, inventory) as container:
        resolved = resolve_recipe(container.settings, recipe, override or ())
        with console.step("doctor") as report:
            findings = examine(container, resolved, report)
            report.outcome = summary(findings)
    if as_json:
        console.json(findings_as_json(container, resolved, findings))
    else:
        show_findings(console, findings)
    if worst(findings) == "error":
        raise RefusedError(f"{container} is not fit for a run of {resolved.name}: {summary(findings)}.")


@app.command()
def demo(state: StateOption = DEFAULT_NODE) -> None:
    """Run the whole story on the embedded node: deploy, venv, warmup, train, fetch, and show what was learned."""
    # Imported here: it needs the SSH server, which would double every other command's start.
    from orchestrator.demo import run_demo

    run_demo(Console(), state)


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


def _follow(
    console: Console,
    container: Container,
    agent: Agent,
    run_id: str | None,
    *,
    tail: int | None = None,
    since_s: float | None = None,
) -> None:
    """Follow a run to its end. Raises :class:`RemoteError` when the run did not finish well; Ctrl-C only detaches."""
    try:
        end: LogEnd = show_logs(
            agent,
            _log_writer().write,
            run_id=run_id,
            follow=True,
            tail_lines=tail,
            since_s=since_s,
            notify=lambda text: console.line(f"  {text}"),
        )
    except KeyboardInterrupt:
        console.line(f"\ndetached: the job goes on.\n{_attach_hint(container, run_id or newest_run(agent))}")
        raise typer.Exit(130) from None
    place = container.destination.make_arguments
    if end.state == "finished":
        console.line(
            f"✓ run {end.run_id} finished. Bring its results home: make fetch RUN_ID={end.run_id} {place}"
        )
        return
    raise RemoteError(
        f"run {end.run_id} on {container.destination} {_END_WORDS.get(end.state, f'is {end.state}')}"
        f"{_reason(agent, end.run_id)}.",
        f"Its log's end: make logs RUN_ID={end.run_id} TAIL=50 {place}",
    )


_END_WORDS = {"failed": "failed", "stopped": "was stopped", "lost": "was lost"}


def _reason(agent: Agent, run_id: str) -> str:
    """Why a run ended as it did, as far as its metrics and its supervisor say."""
    [run] = container_status(agent, run_id)["runs"]
    reason = (run.get("last_metrics") or {}).get("verdict") or run.get("reason")
    return f": {reason}" if reason and run["state"] == "failed" else ""


def _attach_hint(container: Container, run_id: str | None) -> str:
    run = f"RUN_ID={run_id} " if run_id else ""
    place = container.destination.make_arguments
    return f"Attach: make logs FOLLOW=1 {run}{place}\nEnd it: make stop {run}{place}"


def _log_writer() -> LogWriter:
    return LogWriter(sys.stdout.buffer, is_terminal=sys.stdout.isatty())


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not match:
        raise UsageError(f"--since {text}: not a time span.", "For example 90s, 10m, 2h or 1d.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


if __name__ == "__main__":
    main()
