"""Evaluate: a drafter's held-out accepted length, by real speculative decoding in the container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.agent import Agent
from orchestrator.answers import Evaluation
from orchestrator.console import Console, StepReport
from orchestrator.errors import RefusedError
from orchestrator.recipes import job_gpus
from orchestrator.status import is_active, newest_with_a_checkpoint, runs_of
from payload.recipe import Recipe

IDLE_TIMEOUT_S = 1800.0
"""The longest that loading a target, or decoding a few prompts, may take without a word."""


@dataclass(frozen=True)
class Question:
    """What is evaluated, and how. Paths are the container's; a relative one is below its root."""

    drafter: str | None = None
    """A run's folder, or that of an exported drafter. None: the newest run's that has a checkpoint."""
    checkpoint: str = "newest"
    """Of a run: ``newest``, ``best``, or a step's number."""
    recipe: Recipe | None = None
    """None: the run's own."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the run's own recipe, as ``{"data.eval_rows": 8}``."""
    prompts: str | None = None
    """A JSONL file instead of the recipe's held-out rows."""
    temperature: float = 0.0
    max_new_tokens: int | None = None
    at_once: int | None = None
    """Prompts decoded together; 1 tells the speed of serving one person. None: the payload's choice."""


def evaluate(agent: Agent, question: Question, report: StepReport, *, beside: bool = False) -> Evaluation:
    """The answer of ``payload.evaluate``, computed with the venv in use.

    Raises :class:`RefusedError` while a job runs in the container, unless ``beside`` it is asked for, and
    :class:`orchestrator.errors.UsageError` when no drafter is named and no run has a checkpoint.
    """
    runs = [] if beside and question.drafter else runs_of(agent)
    if not beside:
        _refuse_beside_a_job(agent, runs)
    settings = agent.container.settings
    gpu = [str(gpu) for gpu in job_gpus(settings)[:1]]
    request = {
        "drafter": question.drafter or f"runs/{newest_with_a_checkpoint(agent, runs)}",
        "checkpoint": question.checkpoint,
        "overrides": dict(question.overrides),
        "temperature": question.temperature,
        **({"recipe": question.recipe.to_dict()} if question.recipe is not None else {}),
        **({"prompts": question.prompts} if question.prompts is not None else {}),
        **({"at_once": question.at_once} if question.at_once is not None else {}),
        **({"max_new_tokens": question.max_new_tokens} if question.max_new_tokens is not None else {}),
    }
    report.update("starting")
    return agent.ask(
        Evaluation,
        "call",
        {
            "module": "payload.evaluate",
            "request": request,
            "release": None,
            "venv": None,
            "cache": None,
            "env": {**({"CUDA_VISIBLE_DEVICES": gpu[0]} if gpu else {}), **settings.env},
        },
        on_event=report.on_event,
        idle_timeout_s=IDLE_TIMEOUT_S,
    )


def _refuse_beside_a_job(agent: Agent, runs: Sequence[Mapping[str, Any]]) -> None:
    """Raises :class:`RefusedError` naming the active run: beside it both would be slow, or out of memory."""
    for run in runs:
        if is_active(run):
            place = agent.container.destination.make_arguments
            raise RefusedError(
                f"run {run['run_id']} is {run['state']} on {agent.container} and holds its GPUs.",
                f"Its own log tells the accepted length as it goes: make logs RUN_ID={run['run_id']} {place}\n"
                "Evaluate beside it all the same: BESIDE=1 (--beside).",
            )


def show_evaluation(console: Console, found: Evaluation) -> None:
    """The answer of :func:`evaluate` as tables."""
    rows = [
        ("accepted length (tokens per target forward)", f"{found['accepted_length']:.2f}"),
        ("speed against plain decoding", _ratio(found["speedup"])),
        ("texts identical to the target's own", _identical(found)),
        ("prompts", found["prompts"]),
        ("tokens", found["tokens"]),
        ("temperature", f"{found['temperature']:g}"),
        ("drafter", found["drafter"]),
    ]
    console.table(("held-out", ""), rows)
    shares = found["accepted_by_position"]
    console.table(
        ("draft", "accepted with all before it"),
        [(position, f"{100 * share:.0f} %") for position, share in enumerate(shares, start=1)],
    )


def _ratio(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} x"


def _identical(found: Evaluation) -> str:
    if found["identical"] is None:
        return "not comparable: sampled"
    return f"{found['identical']} of {found['prompts']}"
