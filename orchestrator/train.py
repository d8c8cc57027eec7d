"""Train: whatever is missing of deploy, venv and warmup, then the job, detached and exactly once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from orchestrator.agent import Agent
from orchestrator.console import Console
from orchestrator.container import Container
from orchestrator.deploy import deploy
from orchestrator.recipes import job_gpus
from orchestrator.records import RunRecord, new_run_id, save_record
from orchestrator.venv import build_venv
from orchestrator.warmup import Warmed, warm_up
from payload.recipe import Recipe


@dataclass(frozen=True)
class Prepared:
    """A container in which a job can start: the names of what it would run with."""

    agent: Agent
    release: str
    venv: str
    warmed: Warmed


def prepare(container: Container, recipe: Recipe, console: Console, *, wheelhouse: bool = False) -> Prepared:
    """Do what is missing of the steps before training. What is there already costs a question each."""
    with console.step("deploy") as report:
        deployed = deploy(container, report)
        report.outcome = f"release {deployed.release}" + (" was there" if deployed.already_there else " sent")
    agent = Agent.of_release(container, deployed.release)
    with console.step("venv") as report:
        built = build_venv(container, agent, report, wheelhouse=wheelhouse)
        report.outcome = f"venv {built.venv}, torch {built.torch_version}" + (
            " built" if built.created else " was there"
        )
    with console.step("warmup") as report:
        warmed = warm_up(agent, report, release=deployed.release, venv=built.venv, recipe=recipe)
        report.outcome = str(warmed)
    return Prepared(agent, deployed.release, built.venv, warmed)


def start_job(container: Container, prepared: Prepared, recipe: Recipe, console: Console) -> str:
    """Start the job and return its run id.

    The run id goes into the desk's records before anything is asked of the container, and the agent starts an id
    at most once: asking again after a broken link is safe. Raises :class:`orchestrator.errors.RefusedError` when a
    job is running already.
    """
    run_id = new_run_id()
    spec: dict[str, Any] = {
        "run_id": run_id,
        "release": prepared.release,
        "venv": prepared.venv,
        "cache": prepared.warmed.cache,
        "recipe": recipe.to_dict(),
        "gpus": job_gpus(container.settings),
        "nproc": recipe.topology.world_size,
        "command": torchrun_command(container.settings.root, run_id, recipe.topology.world_size),
        "env": dict(container.settings.env),
        "created_at": time.time(),
    }
    destination = container.destination
    save_record(
        RunRecord(
            run_id=run_id,
            host=destination.host_name,
            container=destination.container_id,
            recipe=recipe.name,
            release=prepared.release,
            venv=prepared.venv,
            cache=prepared.warmed.cache,
            asked_at=spec["created_at"],
        )
    )
    with console.step("train") as report:
        prepared.agent.call("start", {"run_id": run_id, "spec": spec}, on_event=report.on_event)
        report.outcome = f"run {run_id} started on {destination} with {recipe.topology.world_size} ranks"
    return run_id


def torchrun_command(root: str, run_id: str, world_size: int) -> list[str]:
    """The job's arguments after the venv's python: one process per GPU under torchrun."""
    return [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)),
        *("-m", "payload.trainer", "--spec", f"{root}/runs/{run_id}/spec.json"),
    ]
