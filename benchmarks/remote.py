"""What the desk costs: a first deploy, a deploy with nothing to do, a script; beside Ansible, on the same container.

``python -m benchmarks.remote`` measures on an embedded node of its own. ``--inventory FILE --host NAME --ct ID``
measures on any container that an inventory knows, of which the releases (not the runs and venvs) are removed for each
first deploy: take one that is there for that. Every figure of a command is wall time from the start of its process to
its end, the median of ``--rounds``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import remote_ansible, remote_fleet, remote_logs
from orchestrator.agent import Agent
from orchestrator.connection import Connection
from orchestrator.console import Console, StepReport
from orchestrator.container import Container
from orchestrator.deploy import deploy
from orchestrator.inventory import Destination, load_inventory, resolve
from orchestrator.localnode import node
from orchestrator.script import run_script

TARGETS_S = {"first deploy": 1.2, "no-op deploy": 0.7, "script": 0.45}
"""What was asked for on an LXC container over loopback."""

ANSIBLE_VENV = Path(".dflash/bench-remote/ansible")
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Place:
    """The container that is measured, and the command line for it."""

    destination: Destination

    def command(self, *words: str) -> float:
        """Run ``orchestrator`` with ``words`` to its end; its seconds. Raises RuntimeError when it fails."""
        verb, *rest = words
        place = ["--inventory", str(self.destination.inventory), "--host", self.destination.host_name]
        began = time.monotonic()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "orchestrator.cli",
                verb,
                *place,
                "--ct",
                self.destination.container_id,
                *rest,
            ],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        seconds = time.monotonic() - began
        if done.returncode != 0:
            raise RuntimeError(f"orchestrator {' '.join(words)} failed:\n{done.stderr}")
        return seconds

    @contextlib.contextmanager
    def container(self) -> Iterator[Container]:
        with Connection(self.destination.host_name, self.destination.host) as connection:
            yield Container(connection, self.destination)

    def forget_releases(self) -> None:
        """Make the next deploy a first one."""
        root = self.destination.container.root
        with self.container() as container:
            container.run(["rm", "-rf", f"{root}/releases", f"{root}/current", f"{root}/incoming"])


def commands(place: Place, script: Path, rounds: int) -> dict[str, float]:
    """Median seconds of a first deploy, a deploy with nothing to do, and a script."""
    seconds: dict[str, list[float]] = {name: [] for name in TARGETS_S}
    for _ in range(rounds):
        place.forget_releases()
        seconds["first deploy"].append(place.command("deploy"))
        seconds["no-op deploy"].append(place.command("deploy"))
        seconds["script"].append(place.command("script", str(script)))
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def without_start(place: Place, script: Path, rounds: int) -> dict[str, float]:
    """Median seconds of the same steps in a process that runs already, each from before its login to its end."""
    seconds: dict[str, list[float]] = {name: [] for name in TARGETS_S}
    silent = StepReport(Console(quiet=True), "", None, None)
    for _ in range(rounds):
        place.forget_releases()
        for name in ("first deploy", "no-op deploy"):
            began = time.monotonic()
            with place.container() as container:
                deploy(container, silent)
            seconds[name].append(time.monotonic() - began)
        began = time.monotonic()
        with place.container() as container:
            run_script(Agent.current(container), script, (), lambda stream, data: None)
        seconds["script"].append(time.monotonic() - began)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def parts(place: Place, rounds: int = 9) -> dict[str, float]:
    """Where the time of a command goes: median seconds of each part, on one connection where it needs one."""

    def median(work: Callable[[], object]) -> float:
        taken = []
        for _ in range(rounds):
            began = time.monotonic()
            work()
            taken.append(time.monotonic() - began)
        return statistics.median(taken)

    def imports() -> None:
        subprocess.run([sys.executable, "-c", "import orchestrator.cli_fleet"], cwd=REPOSITORY, check=True)

    def connect() -> None:
        with Connection(place.destination.host_name, place.destination.host) as connection:
            connection.open()

    with place.container() as container:
        container.run(["true"])
        return {
            "Python and imports at the desk": median(imports),
            "SSH login": median(connect),
            "an empty command on the host": median(lambda: container.connection.run(["true"])),
            "an empty command in the container": median(lambda: container.run(["true"])),
            "an answer of the agent": median(lambda: Agent.current(container).call("hello")),
        }


def by_ansible(destination: Destination, folder: Path) -> dict[str, float]:
    """Seconds of the same by Ansible, once each, after a run that fills its caches."""
    ansible = remote_ansible.prepare(remote_ansible.install(ANSIBLE_VENV.absolute()), folder, destination)
    ansible.play("clean")
    found = {
        "first deploy": ansible.play("deploy"),
        "no-op deploy": ansible.play("deploy"),
        "script": ansible.play("script"),
        "first deploy, as one archive": ansible.play("archive"),
        "no-op deploy, as one archive": ansible.play("archive"),
    }
    ansible.play("clean")
    return found


def table(ours: dict[str, float], inner: dict[str, float], theirs: dict[str, float]) -> str:
    """The comparison as Markdown."""
    lines = [
        "| | this | asked for | Ansible | ratio | Ansible, one archive | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, seconds in ours.items():
        cells = [f"{seconds:.2f} s", f"{inner[name]:.2f} s", f"{TARGETS_S[name]:.2f} s"]
        for other in (theirs.get(name), theirs.get(f"{name}, as one archive")):
            cells += ["", ""] if other is None else [f"{other:.1f} s", f"{other / seconds:.0f}x"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rows(title: str, values: dict[str, float]) -> str:
    """Named seconds as Markdown."""
    body = [f"| {name} | {1000 * seconds:.0f} ms |" for name, seconds in values.items()]
    return "\n".join([f"| {title} | |", "|---|---|", *body])


@contextlib.contextmanager
def measured_place(options: argparse.Namespace, folder: Path) -> Iterator[Place]:
    """The container that the command line names, else one of an embedded node that lives as long as this."""
    if options.inventory is not None:
        inventory = load_inventory(options.inventory)
        yield Place(resolve(inventory, options.host, options.ct, options.inventory.absolute()))
        return
    info = node.start(folder / "node")
    try:
        inventory = load_inventory(info.inventory)
        yield Place(resolve(inventory, "local", info.containers[0], info.inventory))
    finally:
        node.stop(folder / "node")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inventory", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--ct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-ansible", action="store_true", help="its part takes minutes")
    parser.add_argument(
        "--containers", type=int, default=64, help="of the embedded nodes for many; 0: leave it out"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures as JSON")
    options = parser.parse_args()
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as name:
        folder = Path(name)
        with measured_place(options, folder) as place:
            script = folder / "script.py"
            script.write_text("#!/usr/bin/env python3\nprint('done')\n")
            script.chmod(0o755)
            place.command("deploy")
            ours = figures["commands_s"] = commands(place, script, options.rounds)
            inner = figures["without_start_s"] = without_start(place, script, options.rounds)
            where = figures["parts_s"] = parts(place)
            logs = figures["logs_s"] = remote_logs.measure(place.destination)
            theirs: dict[str, float] = {}
            if not options.without_ansible:
                theirs = by_ansible(place.destination, folder / "ansible")
            figures["ansible_s"] = theirs
            say(f"{place.destination}, median of {options.rounds}:\n\n{table(ours, inner, theirs)}\n")
            say(f"{rows('where the time goes', where)}\n\n{rows('logs', logs)}\n")
        if options.containers:
            many = figures["many_s"] = remote_fleet.measure(folder / "many", options.containers)
            say(rows(f"{options.containers} containers", many))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
