"""Which recipe a run follows, with the inventory's GPUs and the command line's overrides in it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from orchestrator.container import Container
from orchestrator.errors import UsageError
from orchestrator.settings import ContainerSettings
from payload.errors import PayloadError
from payload.recipe import (
    MAY_CHANGE_IN_A_RESUME,
    READ_BY_EVALUATION,
    Recipe,
    load_recipe,
    recipe_from_dict,
)


def resolve_recipe(
    settings: ContainerSettings, name: str | None = None, overrides: Sequence[str] = ()
) -> Recipe:
    """The recipe ``name`` (the container's own without it) with ``key=value`` overrides such as ``train.steps=100``.

    The container's ``targets`` and ``drafters`` replace the recipe's topology. Raises :class:`UsageError`.
    """
    values: dict[str, Any] = {}
    if settings.targets is not None and settings.drafters is not None:
        rank_of = {gpu: rank for rank, gpu in enumerate(job_gpus(settings))}
        values["topology.targets"] = [rank_of[gpu] for gpu in settings.targets]
        values["topology.drafters"] = [rank_of[gpu] for gpu in settings.drafters]
    values |= parse_overrides(overrides)
    try:
        return load_recipe(name or settings.recipe, values)
    except PayloadError as error:
        raise UsageError(error.message, error.hint) from None


def recipe_of_run(container: Container, run_id: str) -> Recipe:
    """The recipe, all its values, that a run of the container was started with.

    Raises :class:`UsageError` when there is no such run or its recipe is none of this version, and what
    :meth:`Container.explain` finds when it cannot be read.
    """
    read = container.run(["cat", f"{container.settings.root}/runs/{run_id}/spec.json"])
    if "No such file or directory" in read.stderr_text():
        raise UsageError(
            f"{container}: there is no run {run_id}.",
            f"make status {container.destination.make_arguments} lists those that there are.",
        )
    if read.exit_status != 0:
        raise container.explain(read, f"the recipe of run {run_id} could not be read")
    try:
        return recipe_from_dict(json.loads(read.stdout)["recipe"], f"the recipe of run {run_id}")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"The spec of run {run_id} holds no recipe.") from None
    except PayloadError as error:
        raise UsageError(error.message, "Name the recipe: RECIPE= (--recipe).") from None


def recipe_to_resume(
    container: Container, run_id: str, name: str | None = None, overrides: Sequence[str] = ()
) -> Recipe:
    """The recipe with which a run is gone on from: its own, or the one of that ``name``, with ``overrides``.

    Raises :class:`UsageError` when that would compute something else than the run's own.
    """
    named = resolve_recipe(container.settings, name, overrides) if name is not None else None
    try:
        own = recipe_of_run(container, run_id)
    except UsageError:
        if named is None:
            raise
        # Of another version: the job itself compares what it computes.
        return named
    resumed = named or changed_recipe(own, overrides)
    if changed := own.changes_for_a_resume(resumed):
        raise UsageError(
            f"RESUME={run_id} goes on exactly as that run would have; {', '.join(changed)} cannot change.",
            f"Leave RECIPE= out, and of SET= all but {', '.join(MAY_CHANGE_IN_A_RESUME)}. To train its drafter "
            f"otherwise, start a new run: make train RECIPE=… SET='train.from_pretrained=runs/{run_id} …' "
            f"{container.destination.make_arguments}",
        )
    return resumed


def refuse_unread_by_evaluation(overrides: Sequence[str]) -> None:
    """Raises :class:`UsageError` for what an evaluation does not read, so that nobody believes it has an effect."""
    unread = [key for key in _flat_keys(parse_overrides(overrides)) if not _is_read_by_evaluation(key)]
    if unread:
        raise UsageError(
            f"Evaluating does not use {', '.join(unread)}: a drafter's shape comes with its weights.",
            f"SET= may change {', '.join(READ_BY_EVALUATION)}.",
        )


def _flat_keys(values: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}.{below}" if below else key
        for key, value in values.items()
        for below in (value if isinstance(value, dict) and value else [""])
    ]


def _is_read_by_evaluation(key: str) -> bool:
    return any(key == known or key.startswith(f"{known}.") for known in READ_BY_EVALUATION)


def changed_recipe(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """``recipe`` with ``key=value`` overrides. Raises :class:`UsageError` for one that does not fit it."""
    try:
        return recipe_from_dict(recipe.to_dict(), f"recipe {recipe.name}", parse_overrides(overrides))
    except PayloadError as error:
        raise UsageError(error.message, error.hint) from None


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """``key=value`` texts as values by key; a value is YAML. Raises :class:`UsageError`."""
    values: dict[str, Any] = {}
    for override in _whole(overrides):
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise UsageError(
                f"--set {override}: not of the form key=value.",
                'For example: --set train.steps=100, or SET="train.steps=100 optim.lr=3e-4" with make, where a space '
                "inside a value needs brackets around it.",
            )
        try:
            values[key.strip()] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, AttributeError, RecursionError):
            # What looks like a date or has a tag is converted, and the conversion fails in its own ways.
            raise UsageError(f"--set {override}: {text!r} is not a YAML value.") from None
    return values


def make_arguments(name: str | None, overrides: Sequence[str]) -> str:
    """The recipe as it was named, for a command line of make that a person can copy."""
    words = [f"RECIPE={name}"] if name is not None else []
    if overrides:
        words.append(f"SET={' '.join(overrides)}")
    return " ".join(shlex.quote(word) for word in words)


def _whole(words: Sequence[str]) -> Iterator[str]:
    """The overrides of make's words: one that leaves a bracket open goes on in the next, ``train.fp8=[head, mlp]``."""
    opened = ""
    for word in words:
        opened = f"{opened} {word}" if opened else word
        if all(opened.count(left) <= opened.count(right) for left, right in ("[]", "{}")):
            yield opened
            opened = ""
    if opened:
        yield opened


def job_gpus(settings: ContainerSettings) -> list[int]:
    """The container's GPUs that a job uses, by rank; empty when the inventory does not say (ranks are GPUs then)."""
    return sorted({*(settings.targets or ()), *(settings.drafters or ())})
