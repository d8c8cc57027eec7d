"""The command `orchestrator evaluate`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.agent import Agent, NoAnswer
from orchestrator.cli_options import (
    CtOption,
    HostOption,
    InventoryOption,
    JsonOption,
    RecipeOption,
    RunArgument,
    SetOption,
    deployed_step,
    open_container,
)
from orchestrator.console import Console
from orchestrator.container import Container
from orchestrator.errors import RemoteError, UsageError
from orchestrator.evaluate import Question, show_evaluation
from orchestrator.evaluate import evaluate as evaluate_drafter
from orchestrator.inventory import DEFAULT_INVENTORY
from orchestrator.recipes import (
    changed_recipe,
    parse_overrides,
    recipe_of_run,
    refuse_unread_by_evaluation,
    resolve_recipe,
)
from orchestrator.records import RUN_ID
from orchestrator.status import newest_with_a_checkpoint, runs_of


def evaluate(
    run: RunArgument = None,
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    recipe: RecipeOption = None,
    override: SetOption = None,
    drafter: Annotated[
        str | None,
        typer.Option("--drafter", metavar="PATH", help="An exported drafter in the container, not a run's."),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="Of the run: newest, best, or a step's number.")
    ] = "newest",
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", metavar="PATH", help="JSONL in the container, not the recipe's data.eval."),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="An answer's length; else the recipe's.")
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            "--at-once", min=1, help="Prompts decoded together; 1: the speed of serving one person."
        ),
    ] = None,
    beside: Annotated[bool, typer.Option("--beside", help="Even while a job holds the GPUs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Decode held-out prompts with a drafter: accepted length, speed, and whether the text is the target's."""
    if run is not None and not RUN_ID.fullmatch(run):
        raise UsageError(f"{run}: not a run id.", "`status` lists the runs of a container.")
    if drafter is not None and recipe is None:
        raise UsageError(
            "--drafter without --recipe: which target it drafts for is not known.",
            "Name the recipe whose target it is: RECIPE= (--recipe).",
        )
    refuse_unread_by_evaluation(override or ())
    console = Console()
    with open_container(console, host, ct, inventory) as container:
        own = recipe is None
        resolved = None if own else resolve_recipe(container.settings, recipe, override or ())
        if own and override:
            run = _check_overrides(container, run, override)
        with deployed_step("evaluate", console, container) as (agent, report):
            question = Question(
                drafter=drafter or (f"runs/{run}" if run else None),
                checkpoint=checkpoint,
                recipe=resolved,
                overrides=parse_overrides(override or ()) if own else {},
                prompts=prompts,
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                at_once=at_once,
            )
            found = evaluate_drafter(agent, question, report, beside=beside)
            report.outcome = f"accepted length {found['accepted_length']:.2f} on {found['prompts']} prompts"
    if as_json:
        console.json(found)
    else:
        show_evaluation(console, found)


def _check_overrides(container: Container, run: str | None, override: list[str]) -> str | None:
    """Raises :class:`UsageError` for what does not fit a run's own recipe, before anything is brought there.

    Returns the run that it looked at; None when the newest is meant and no release tells of it yet. A run that cannot
    be looked at is left to the evaluation itself.
    """
    parse_overrides(override)
    try:
        run = run or _newest(Agent.current(container))
        recipe = recipe_of_run(container, run)
    except (NoAnswer, RemoteError):
        return run
    changed_recipe(recipe, override)
    return run


def _newest(agent: Agent) -> str:
    return newest_with_a_checkpoint(agent, runs_of(agent))
