"""The demo: the whole story on the embedded node, ended by what the drafter learned."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.connection import Connection
from orchestrator.console import Console, LogWriter
from orchestrator.container import Container
from orchestrator.errors import RemoteError
from orchestrator.fetch import fetch
from orchestrator.inventory import load_inventory, resolve
from orchestrator.localnode import node
from orchestrator.logs import show_logs
from orchestrator.recipes import resolve_recipe
from orchestrator.train import prepare, start_job

HOST = "local"
LEAST_LOSS_FALL = 0.8
"""The last loss must be at most this share of the first."""
LEAST_ACCEPTED_RISE = 1.3
"""The accepted length after training must be at least this many times the one before."""


@dataclass(frozen=True)
class Learned:
    """What a run's metrics say it learned. Accepted lengths are tokens per target forward on held-out prompts."""

    first_loss: float
    last_loss: float
    accepted_before: float
    accepted_after: float

    @property
    def clearly(self) -> bool:
        return (
            self.last_loss <= LEAST_LOSS_FALL * self.first_loss
            and self.accepted_after >= LEAST_ACCEPTED_RISE * self.accepted_before
        )


def run_demo(console: Console, state: Path) -> None:
    """Run the story in ``state``, whose node goes on running.

    Raises :class:`RemoteError` unless the drafter clearly improved, and whatever a step raises.
    """
    started = time.monotonic()
    console.line(
        "The whole story on this machine: an SSH server and a pct stand in for a Proxmox host.\n", "bold"
    )
    with console.step("node") as report:
        info = node.start(state)
        report.outcome = f"SSH on {info.address}:{info.port}, container {info.containers[0]}"
    destination = resolve(load_inventory(info.inventory), HOST, info.containers[0], info.inventory)
    recipe = resolve_recipe(destination.container)
    with Connection(HOST, destination.host, console.line) as connection:
        container = Container(connection, destination)
        prepared = prepare(container, recipe, console)
        run_id = start_job(container, prepared, recipe, console)
        log = LogWriter(sys.stdout.buffer, is_terminal=sys.stdout.isatty())
        end = show_logs(prepared.agent, log.write, run_id=run_id, follow=True, notify=console.line)
        with console.step("fetch") as report:
            fetched = fetch(container, prepared.agent, run_id, state.parent / "runs", report)
            report.outcome = f"{fetched.files} files in {fetched.folder}"
    if end.state != "finished":
        raise RemoteError(
            f"The demo's run {run_id} is {end.state}.", f"Its log is in {fetched.folder}/output.log."
        )
    learned = read_learned(fetched.folder / "metrics.jsonl")
    show_learned(console, learned)
    if not learned.clearly:
        raise RemoteError(
            "The drafter did not clearly improve: that is a fault of the trainer.",
            f"Metrics: {fetched.folder}.",
        )
    console.line(f"\nDone in {time.monotonic() - started:.0f} s. The node goes on running; try it:", "bold")
    for target in ("status", "probe", "logs TAIL=5", "train"):
        console.line(f"  make {target} {destination.make_arguments}")
    console.line("  make node-stop")


def read_learned(metrics: Path) -> Learned:
    """Losses and accepted lengths from a run's metrics.jsonl. Raises :class:`RemoteError` when one is missing."""
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()
    ]
    losses = [float(row["loss"]) for row in rows if row.get("loss") is not None]
    accepted = [float(row["accepted_length"]) for row in rows if row.get("accepted_length") is not None]
    if len(losses) < 2 or len(accepted) < 2:
        raise RemoteError(
            f"{metrics} holds no two losses and accepted lengths to compare.", "Look at its output.log."
        )
    return Learned(losses[0], losses[-1], accepted[0], accepted[-1])


def show_learned(console: Console, learned: Learned) -> None:
    console.out.print()
    console.table(
        ("", "before", "after"),
        [
            ("training loss", f"{learned.first_loss:.3f}", f"{learned.last_loss:.3f}"),
            (
                "held-out accepted length (tokens per target forward, by real speculative decoding)",
                f"{learned.accepted_before:.2f}",
                f"{learned.accepted_after:.2f}",
            ),
        ],
    )
