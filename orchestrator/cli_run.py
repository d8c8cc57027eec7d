"""The commands of a run's life: train, logs, stop, fetch."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.agent import Agent
from orchestrator.cli_options import (
    CtOption,
    HostOption,
    InventoryOption,
    RecipeOption,
    RunArgument,
    SetOption,
    WheelhouseOption,
    open_container,
)
from orchestrator.console import Console, LogWriter
from orchestrator.container import Container
from orchestrator.errors import RemoteError, UsageError
from orchestrator.fetch import fetch as fetch_run
from orchestrator.inventory import DEFAULT_INVENTORY
from orchestrator.logs import LogEnd, show_logs
from orchestrator.recipes import make_arguments, recipe_to_resume, resolve_recipe
from orchestrator.records import RUN_ID
from orchestrator.status import checkpoints_of, newest_of, newest_run, run_of, runs_of
from orchestrator.status import stop as stop_run
from orchestrator.train import prepare, start_job


def train(
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    recipe: RecipeOption = None,
    override: SetOption = None,
    wheelhouse: WheelhouseOption = False,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="RUN", help="Go on from the newest checkpoint of that run, with its recipe."
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Start the job and return at once.")] = False,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold", help="Skip warmup: without a warm cache, the first step compiles, and may race."
        ),
    ] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Go on where the checks of `doctor` found errors.")
    ] = False,
) -> None:
    """Do what is missing of the steps before, start the job once, detached, and follow its log. Ctrl-C detaches."""
    console = Console()
    with open_container(console, host, ct, inventory) as container:
        if resume is not None and not RUN_ID.fullmatch(resume):
            raise UsageError(f"--resume {resume}: not a run id.", "`status` lists the runs of a container.")
        if resume is not None:
            resolved = recipe_to_resume(container, resume, recipe, override or ())
        else:
            resolved = resolve_recipe(container.settings, recipe, override or ())
        prepared = prepare(
            container,
            resolved,
            console,
            wheelhouse=wheelhouse,
            cold=cold,
            anyway=anyway,
            resume=resume,
            asked=make_arguments(recipe, override or ()),
        )
        run_id = start_job(container, prepared, resolved, console, resume=resume)
        if detach:
            console.line(_attach_hint(container, run_id))
            return
        _follow(console, container, prepared.agent, run_id)


def logs(
    run: RunArgument = None,
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run is over.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", min=0, help="Only the last N lines.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Only the last while: 90s, 10m, 2h, 1d; 10 is seconds.")
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
        runs = [] if run else runs_of(agent)
        run_id = run or newest_of(agent, runs)
        with console.step("fetch") as report:
            if note := _newer_without_a_checkpoint(runs):
                report.note(note)
            fetched = fetch_run(container, agent, run_id, to, report)
            report.outcome = (
                f"{fetched.files} files in {fetched.folder}, {fetched.new_files} of them new "
                f"({fetched.size_bytes / 1e6:.1f} MB)"
            )


def _newer_without_a_checkpoint(runs: Sequence[Mapping[str, Any]]) -> str:
    """What to know where the newest run, which is fetched, has no checkpoint and an earlier one has."""
    earlier = next((run["run_id"] for run in runs[1:] if checkpoints_of(run)), None)
    if earlier is None or checkpoints_of(runs[0]):
        return ""
    return (
        f"run {runs[0]['run_id']}, the newest, has no checkpoint; the newest that has one: RUN_ID={earlier}"
    )


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
        f"{_reason(agent, end.run_id)}",
        f"Its log's end: make logs RUN_ID={end.run_id} TAIL=50 {place}",
    )


_END_WORDS = {"failed": "failed", "stopped": "was stopped", "lost": "was lost"}


def _reason(agent: Agent, run_id: str) -> str:
    """Why a run ended as it did, as far as its metrics and its supervisor say."""
    run = run_of(agent, run_id)
    reason = (run.get("last_metrics") or {}).get("verdict") or run.get("reason")
    return f": {str(reason).rstrip('.')}." if reason and run["state"] == "failed" else "."


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
