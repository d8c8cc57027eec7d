"""The commands: parse, call one step, show what came of it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.agent import Agent
from orchestrator.cache import list_caches, prune_caches, show_cache, show_caches, verify_cache
from orchestrator.connection import Connection
from orchestrator.console import Console, LogWriter, StepReport, size_text
from orchestrator.container import Container
from orchestrator.deploy import deploy as deploy_release
from orchestrator.errors import OrchestratorError, RemoteError, UsageError
from orchestrator.fetch import fetch as fetch_run
from orchestrator.inventory import DEFAULT_INVENTORY, from_here, load_inventory, resolve
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
node_app = typer.Typer(
    no_args_is_help=True, help="The embedded node: an SSH server and a pct on this machine."
)
app.add_typer(node_app, name="node")
cache_app = typer.Typer(no_args_is_help=True, help="A container's compile caches.")
app.add_typer(cache_app, name="cache")
# `demo` and `node` import the SSH server inside their functions: it would double every other command's start.

HostOption = Annotated[
    str | None,
    typer.Option("--host", envvar="DFLASH_HOST", help="A host of the inventory, or a plain IP address."),
]
CtOption = Annotated[
    str | None, typer.Option("--ct", envvar="DFLASH_CT", help="The container's id on that host.")
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

DEFAULT_NODE = Path(".dflash/node")


@app.command()
def deploy(
    host: HostOption = None, ct: CtOption = None, inventory: InventoryOption = DEFAULT_INVENTORY
) -> None:
    """Bring the payload into the container as one verified, content-named release."""
    console = Console()
    with _container(console, host, ct, inventory) as container, console.step("deploy") as report:
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
    with _step("venv", console, host, ct, inventory) as (agent, report):
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
    with _container(console, host, ct, inventory) as container:
        resolved = resolve_recipe(container.settings, recipe, override or ())
        release = _deployed(container, console)
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
) -> None:
    """Do what is missing of the steps before, start the job once, detached, and follow its log. Ctrl-C detaches."""
    console = Console()
    with _container(console, host, ct, inventory) as container:
        resolved = resolve_recipe(container.settings, recipe, override or ())
        if resume is not None and not RUN_ID.fullmatch(resume):
            raise UsageError(f"--resume {resume}: not a run id.", "`status` lists the runs of a container.")
        prepared = prepare(container, resolved, console, wheelhouse=wheelhouse, cold=cold)
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
    with _container(console, host, ct, inventory) as container:
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
    with _container(console, host, ct, inventory) as container:
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
    with _container(console, host, ct, inventory) as container:
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
    with _container(console, host, ct, inventory) as container:
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
    with _step("prune", console, host, ct, inventory) as (agent, report):
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
    with _step("probe", console, host, ct, inventory) as (agent, report):
        found = probe_container(agent, report)
        report.outcome = str(agent.container)
    if as_json:
        console.json(found)
    else:
        show_probe(console, found)


@cache_app.command("list")
def cache_list(
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    as_json: JsonOption = False,
) -> None:
    """Show the container's compile caches: size, state, and the runs that pin them."""
    console = Console()
    with _step("cache", console, host, ct, inventory) as (agent, report):
        caches = list_caches(agent, report)
        report.outcome = f"{len(caches)} on {agent.container}"
    if as_json:
        console.json(caches)
    else:
        show_caches(console, caches)


@cache_app.command("show")
def cache_show(
    fingerprint: FingerprintArgument,
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
) -> None:
    """Show one cache as JSON: the facts behind its name, its programs, its portable artifact."""
    console = Console()
    with _step("cache", console, host, ct, inventory) as (agent, report):
        found = show_cache(agent, fingerprint, report)
        report.outcome = fingerprint
    console.json(found)


@cache_app.command("verify")
def cache_verify(
    fingerprint: FingerprintArgument,
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
) -> None:
    """Check every file of a cache against its manifest; a damaged one is an error."""
    console = Console()
    with _step("cache", console, host, ct, inventory) as (agent, report):
        if wrong := verify_cache(agent, fingerprint, report):
            raise RemoteError(
                f"the compile cache {fingerprint} is damaged: {wrong[0]} ({len(wrong)} in all).",
                "`warmup` refuses it and builds it anew.",
            )
        report.outcome = f"{fingerprint} is whole"


@cache_app.command("prune")
def cache_prune(
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    apply: Annotated[bool, typer.Option("--apply", help="Remove them; else they are only named.")] = False,
) -> None:
    """Remove the caches that no run pins and no warm-up is filling."""
    console = Console()
    with _step("cache", console, host, ct, inventory) as (agent, report):
        pruned = prune_caches(agent, report, apply=apply)
        names = ", ".join(pruned["removed"]) or "none"
        report.outcome = f"{'removed' if apply else 'would remove'}: {names} ({size_text(pruned['bytes'])})"


@app.command()
def demo(state: StateOption = DEFAULT_NODE) -> None:
    """Run the whole story on the embedded node: deploy, venv, warmup, train, fetch, and show what was learned."""
    from orchestrator.demo import run_demo

    run_demo(Console(), state)


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


@contextlib.contextmanager
def _container(console: Console, host: str | None, ct: str | None, inventory: Path) -> Iterator[Container]:
    destination = resolve(load_inventory(inventory), host, ct, inventory)
    try:
        with Connection(destination.host_name, destination.host, console.line) as connection:
            yield Container(connection, destination)
    except KeyboardInterrupt:
        console.line(
            f"\ninterrupted. What was asked of {destination} may go on there; nothing half-done is used. "
            f"Look: make status {destination.make_arguments}"
        )
        raise typer.Exit(130) from None


@contextlib.contextmanager
def _step(
    name: str, console: Console, host: str | None, ct: str | None, inventory: Path
) -> Iterator[tuple[Agent, StepReport]]:
    """A step on a container that has the desk's release: its agent, and the line to report on."""
    with _container(console, host, ct, inventory) as container:
        agent = Agent.of_release(container, _deployed(container, console))
        with console.step(name) as report:
            yield agent, report


def _deployed(container: Container, console: Console) -> str:
    """The desk's own release, deployed when it is missing."""
    with console.step("deploy") as report:
        deployed = deploy_release(container, report)
        report.outcome = f"release {deployed.release}" + (" was there" if deployed.already_there else " sent")
    return deployed.release


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
