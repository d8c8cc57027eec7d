"""Train: whatever is missing of deploy, venv and warmup, then the job, detached and exactly once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import tenacity

from orchestrator.agent import Agent
from orchestrator.answers import Started
from orchestrator.checks import judge, needs_of
from orchestrator.console import Console, StepReport
from orchestrator.container import Container
from orchestrator.deploy import deploy
from orchestrator.doctor import look, refuse_if_unfit, summary, try_cuda
from orchestrator.errors import RefusedError, RemoteError, TransportError
from orchestrator.recipes import job_gpus
from orchestrator.records import RunRecord, new_run_id, save_record
from orchestrator.status import checkpoints_of, is_active, run_of, runs_of
from orchestrator.venv import build_venv
from orchestrator.warmup import Warmed, find_warm, warm_up
from payload.recipe import Recipe

START_ATTEMPTS = 3


@dataclass(frozen=True)
class Prepared:
    """A container in which a job can start: the names of what it would run with."""

    agent: Agent
    release: str
    venv: str
    warmed: Warmed | None
    """None for a cold start: the first step compiles."""


def prepare(
    container: Container,
    recipe: Recipe,
    console: Console,
    *,
    wheelhouse: bool = False,
    cold: bool = False,
    anyway: bool = False,
    resume: str | None = None,
    asked: str = "",
) -> Prepared:
    """Do what is missing of the steps before training. What is there already costs a question each.

    ``cold`` compiles nothing, and uses a warm cache that is there; ``anyway`` goes on where the preflight found errors;
    ``resume``: the run from whose checkpoint the job goes on; ``asked``: the recipe as it was named to make.
    Raises :class:`RefusedError` when a job runs in the container, it is not fit for one or the run to resume has no
    checkpoint to go on from, before anything but the
    release is touched; what only the venv can tell, CUDA's start, is asked once it is there.
    """
    with console.step("deploy") as report:
        deployed = deploy(container, report)
        report.outcome = f"release {deployed.release}" + (" was there" if deployed.already_there else " sent")
    agent = Agent.of_release(container, deployed.release)
    refuse_while_a_job_runs(agent)
    if resume is not None:
        refuse_to_resume_without_a_checkpoint(agent, resume)
    destination = container.destination
    needs = needs_of(
        container.settings,
        destination.container_id,
        recipe,
        destination.make_arguments,
        resumes=resume is not None,
    )
    # What doctor would look at for a resume is another recipe.
    doctor = (
        ""
        if resume is not None
        else " ".join(filter(None, ("make doctor", asked, destination.make_arguments)))
    )
    with console.step("check") as report:
        seen = look(agent, needs, report)
        findings = judge(seen, needs)
        refuse_if_unfit(container, findings, anyway=anyway, report=report, doctor=doctor)
        report.outcome = summary(findings)
    with console.step("venv") as report:
        built = build_venv(container, agent, report, wheelhouse=wheelhouse)
        report.outcome = f"venv {built.venv}, torch {built.torch_version}" + (
            " built" if built.created else " was there"
        )
    if needs.gpus:
        with console.step("cuda") as report:
            seen = try_cuda(agent, needs, seen, report, release=deployed.release, venv=built.venv)
            findings = [finding for finding in judge(seen, needs) if finding.check == "cuda"]
            refuse_if_unfit(container, findings, anyway=anyway, report=report, doctor=doctor)
            report.outcome = "; ".join(finding.seen for finding in findings)
    if cold:
        with console.step("cache") as report:
            try:
                warm = find_warm(agent, report, release=deployed.release, venv=built.venv, recipe=recipe)
            except (RemoteError, RefusedError) as error:
                # Who wants no warm-up may want none because it fails.
                report.note(f"whether a cache is warm is not known: {error.message}")
                warm = None
            report.outcome = str(warm) if warm is not None else "cold: the first step compiles"
        return Prepared(agent, deployed.release, built.venv, warm)
    with console.step("warmup") as report:
        warmed = warm_up(agent, report, release=deployed.release, venv=built.venv, recipe=recipe)
        report.outcome = str(warmed)
    return Prepared(agent, deployed.release, built.venv, warmed)


def start_job(
    container: Container, prepared: Prepared, recipe: Recipe, console: Console, *, resume: str | None = None
) -> str:
    """Start the job and return its run id.

    ``resume`` is an earlier run of the same recipe and data in the same container, whose newest whole checkpoint the
    new run goes on from.

    The run id goes into the desk's records before anything is asked of the container, and the agent starts an id
    at most once: asking again after a broken link is safe. Raises :class:`orchestrator.errors.RefusedError` when a
    job is running already.
    """
    run_id = new_run_id()
    cache = prepared.warmed.cache if prepared.warmed else None
    gpus = ",".join(str(gpu) for gpu in job_gpus(container.settings))
    environment = {
        # torchrun's own default for several ranks, said here so that it need not warn of it.
        "OMP_NUM_THREADS": "1",
        **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}),
        **container.settings.env,
    }
    spec: dict[str, Any] = {
        "run_id": run_id,
        "release": prepared.release,
        "venv": prepared.venv,
        "cache": cache,
        "recipe": recipe.to_dict(),
        "nproc": recipe.topology.world_size,
        "command": torchrun_command(
            container.settings.root, run_id, recipe.topology.world_size, cold=prepared.warmed is None
        ),
        "env": environment,
        "created_at": time.time(),
        "resume_from": f"../{resume}" if resume else None,
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
            cache=cache,
            asked_at=spec["created_at"],
        )
    )
    with console.step("train") as report:
        answer = _ask_to_start(prepared.agent, run_id, spec, report)
        if answer["state"] in ("failed", "lost", "stopped"):
            raise RemoteError(
                f"run {run_id} did not start on {destination}: {answer.get('reason') or answer['state']}.",
                answer.get("hint")
                or f"Its log, if any: make logs RUN_ID={run_id} {destination.make_arguments}",
            )
        report.outcome = f"run {run_id} started on {destination} with {recipe.topology.world_size} ranks"
    return run_id


def refuse_while_a_job_runs(agent: Agent) -> None:
    """Raises :class:`RefusedError` that names the active run of the container and how to attach to it."""
    for run in runs_of(agent):
        if is_active(run):
            place = agent.container.destination.make_arguments
            raise RefusedError(
                f"run {run['run_id']} is {run['state']} on {agent.container}: one job at a time.",
                f"Follow it: make logs FOLLOW=1 RUN_ID={run['run_id']} {place}\n"
                f"End it: make stop RUN_ID={run['run_id']} {place}",
            )


def refuse_to_resume_without_a_checkpoint(agent: Agent, run_id: str) -> None:
    """Raises :class:`RefusedError` when the run has no whole checkpoint, or one of its last step."""
    run = run_of(agent, run_id)
    place = agent.container.destination.make_arguments
    steps = checkpoints_of(run)
    if not steps:
        before = run.get("resumed")
        raise RefusedError(
            f"run {run_id} on {agent.container} has no checkpoint to go on from.",
            f"It went on from another itself: make train RESUME={before} {place}"
            if before
            else f"Start it anew: make train RECIPE=… {place}   Runs with a checkpoint: make status {place}",
        )
    last = run.get("steps")
    if last is not None and steps[-1] >= last:
        raise RefusedError(
            f"run {run_id} on {agent.container} has done all its {last} steps.",
            "To train on, start a new run from its drafter: "
            f"make train RECIPE=… SET='train.from_pretrained=runs/{run_id}' {place}",
        )


def _ask_to_start(agent: Agent, run_id: str, spec: dict[str, Any], report: StepReport) -> Started:
    """Ask until there is an answer: a run id starts at most once, so asking again after a broken link is safe."""
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(TransportError),
        stop=tenacity.stop_after_attempt(START_ATTEMPTS),
        wait=tenacity.wait_exponential_jitter(multiplier=0.5, max=5),
        before_sleep=lambda _: report.note(
            "no answer to the start; asking again, which cannot start it twice"
        ),
        reraise=True,
    )
    try:
        request = {"run_id": run_id, "spec": spec}
        return retrying(agent.ask, Started, "start", request, on_event=report.on_event)
    except TransportError as error:
        raise TransportError(
            error.message,
            f"Whether run {run_id} started is not known: make status {agent.container.destination.make_arguments}",
        ) from error


def torchrun_command(root: str, run_id: str, world_size: int, *, cold: bool = False) -> list[str]:
    """The job's arguments after the venv's python: one process per GPU under torchrun."""
    return [
        *("-m", "payload.trainer.launch", "--standalone", "--nproc-per-node", str(world_size)),
        *("-m", "payload.trainer", "--spec", f"{root}/runs/{run_id}/spec.json"),
        *(["--cold-ok"] if cold else []),
    ]
