"""Doctor: is a container fit for the run that is planned on it, and if not, what to type.

What is seen comes from one question to the agent, ``pct config`` on the host beside it, and a CUDA init in the venv
where GPUs are asked for; what it means is judged in :mod:`orchestrator.checks`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.agent import Agent
from orchestrator.checks import Finding, Needs, Seen, Severity, judge, needs_of, worst
from orchestrator.checks.model import going_on, mappings, number, text
from orchestrator.console import Console, StepReport, safe
from orchestrator.container import Container
from orchestrator.deploy import Payload, deploy
from orchestrator.errors import OrchestratorError, RefusedError, RemoteError, TransportError
from orchestrator.inventory import Destination
from orchestrator.recipes import job_gpus
from payload.recipe import Recipe

FACTS_TIMEOUT_S = 30.0
CUDA_TIMEOUT_S = 180.0
ANSWER_S = 10.0
_FROZEN = f"an empty command in it did not end within {ANSWER_S:.0f} s: is it frozen or suspended?"

_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "red")}


@dataclass(frozen=True)
class Examined:
    """The findings about a run of one recipe in one container."""

    destination: Destination
    recipe: str
    findings: list[Finding]

    @property
    def worst(self) -> Severity:
        return worst(self.findings)

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "host": self.destination.host_name,
            "container": self.destination.container_id,
            "recipe": self.recipe,
            "worst": self.worst,
            "findings": [asdict(finding) for finding in self.findings],
        }


def examine(
    container: Container, recipe: Recipe, report: StepReport, payload: Payload | None = None
) -> Examined:
    """Every finding about a run of ``recipe`` in ``container``; brings the release along when it is missing.

    A container that is there and does not answer is a finding too. Raises
    :class:`orchestrator.errors.OrchestratorError` when the host cannot be asked about it.
    """
    needs = needs_of(
        container.settings, container.destination.container_id, recipe, container.destination.make_arguments
    )
    try:
        # pct exec into a frozen container waits for ever, and the agent's own deadlines are for long work.
        container.run(["true"], timeout_s=ANSWER_S)
    except TransportError as error:
        return Examined(container.destination, recipe.name, _without_facts(container, needs, error, _FROZEN))
    try:
        agent = Agent.of_release(container, deploy(container, report, payload).release)
        seen = look(agent, needs, report)
        findings = judge(try_cuda(agent, needs, seen, report), needs)
    except OrchestratorError as error:
        findings = _without_facts(container, needs, error, "")
    return Examined(container.destination, recipe.name, findings)


def look(agent: Agent, needs: Needs, report: StepReport) -> Seen:
    """What the container and its host say now, without CUDA. Raises :class:`orchestrator.errors.OrchestratorError`."""
    report.update("looking at the container")
    with ThreadPoolExecutor(1) as pool:
        config = pool.submit(agent.container.configuration)
        asked = time.time()
        question = {"port": needs.port, "paths": needs.paths}
        # What is in them counts as not known where it is none of what a check looks for.
        facts = agent.ask(
            dict[str, Any], "facts", question, on_event=report.on_event, timeout_s=FACTS_TIMEOUT_S
        )
        answered = time.time()
        told = number(facts.get("time"))
        return Seen(
            facts,
            config.result(),
            clock_ahead_s=None if told is None else told - answered,
            # The container looked at its clock at some moment in between.
            clock_uncertainty_s=answered - asked,
        )


def try_cuda(
    agent: Agent,
    needs: Needs,
    seen: Seen,
    report: StepReport,
    *,
    release: str | None = None,
    venv: str | None = None,
) -> Seen:
    """``seen`` with a real CUDA init in ``venv`` (default: the one in use), where GPUs are asked for and there."""
    if not needs.gpus or not (venv or text(seen.facts.get("venv"))):
        return seen
    if not mappings(seen.facts.get("nvidia_nodes")):
        return replace(seen, cuda_untried="there is no GPU node")
    if runs := going_on(seen.facts):
        return replace(
            seen, cuda_untried=f"run {', '.join(sorted(runs))} is going on, and has the GPUs' memory"
        )
    report.update("starting CUDA in the venv")
    visible = ",".join(map(str, job_gpus(agent.container.settings)))
    request: dict[str, Any] = {
        "module": "payload.cuda_init",
        "request": {},
        "release": release,
        "venv": venv,
        "cache": None,
        "env": {"CUDA_VISIBLE_DEVICES": visible} if visible else {},
        "timeout_s": CUDA_TIMEOUT_S,
    }
    try:
        return replace(seen, cuda=agent.ask(dict[str, Any], "call", request, on_event=report.on_event))
    except RemoteError as error:
        # A crash in the driver's library is what was looked for.
        return replace(seen, cuda={"error": error.message})


def refuse_if_unfit(
    container: Container, findings: Sequence[Finding], *, anyway: bool, report: StepReport, doctor: str
) -> None:
    """Show warnings shortly. Raises :class:`RefusedError` for errors, which ``anyway`` turns into warnings.

    ``doctor`` is what to type for all of it.
    """
    for finding in findings:
        if finding.severity == "warning" or (finding.severity == "error" and anyway):
            report.note(f"{finding.severity}: {finding.check}: {finding.seen}. {finding.fix}")
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors and not anyway:
        raise RefusedError(
            f"{container} is not fit for this run: "
            + "; ".join(f"{finding.check}: {finding.seen}" for finding in errors)
            + ".",
            "\n".join(f"{finding.check}: {finding.fix}" for finding in errors)
            + (f"\nAll of it: {doctor}   " if doctor else "\n")
            + "Start all the same: ANYWAY=1",
        )


def summary(findings: Sequence[Finding]) -> str:
    """The findings in a few words."""
    counts = {
        severity: [finding.check for finding in findings if finding.severity == severity]
        for severity in ("warning", "error")
    }
    bad = [
        f"{len(checks)} {severity}{'s' if len(checks) > 1 else ''} ({', '.join(checks)})"
        for severity, checks in counts.items()
        if checks
    ]
    return f"{len(findings)} check{'' if len(findings) == 1 else 's'}, " + (" and ".join(bad) or "all well")


def show_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Each finding on a line; below it, where something is wrong, why it matters and what to type."""
    for finding in findings:
        mark, style = _MARKS[finding.severity]
        console.say(f"{mark} {finding.check:<9} {_one_line(finding.seen)}", style)
        if finding.severity != "ok":
            console.say(f"  {'':<9} why: {_one_line(finding.why)}")
            console.say(f"  {'':<9} fix: {_one_line(finding.fix)}")


def _one_line(text: str) -> str:
    """What a container said must not look like a line of ours."""
    return re.sub(r"[\r\n\t]+", " ", safe(text))


def _without_facts(container: Container, needs: Needs, error: OrchestratorError, seen: str) -> list[Finding]:
    """What can be said of a container that does not answer. Raises ``error`` when its host cannot say more either."""
    config = container.configuration()
    if config is None:
        raise error
    fix = error.hint or "look into it with pct enter"
    if seen:
        number = needs.container_id
        fix = (
            f"on the host: pct status {number} --verbose; "
            f"when no backup is going on: pct resume {number}, or lxc-unfreeze -n {number}"
        )
    why = "nothing in it can be looked at, and no run can start"
    locks = [finding for finding in judge(Seen({}, config), needs) if finding.check == "lock"]
    return [Finding("container", "error", seen or error.message, why, fix), *locks]
