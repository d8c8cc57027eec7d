"""The command `orchestrator estimate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli_options import (
    CtOption,
    HostOption,
    InventoryOption,
    JsonOption,
    RecipeOption,
    SetOption,
    deployed_step,
    open_container,
)
from orchestrator.console import Console
from orchestrator.errors import UsageError
from orchestrator.estimate import estimate as estimate_here
from orchestrator.estimate import estimate_in_container, show_estimates
from orchestrator.inventory import DEFAULT_INVENTORY
from orchestrator.recipes import parse_overrides, resolve_recipe
from payload.errors import PayloadError
from payload.recipe import load_recipe


def estimate(
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    recipe: RecipeOption = None,
    override: SetOption = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", help="The target's config.json, or its folder, where the desk knows it not."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate the GPU memory of each role of a recipe. Asks a container only when one is named."""
    console = Console()
    found: Sequence[Mapping[str, Any]]
    if host is not None or ct is not None:
        with open_container(console, host, ct, inventory) as container:
            resolved = resolve_recipe(container.settings, recipe, override or ())
            with deployed_step("estimate", console, container) as (agent, report):
                found = estimate_in_container(agent, resolved, report)
                report.outcome = str(container)
    else:
        if recipe is None:
            raise UsageError(
                "No recipe is named.", "RECIPE= (--recipe); or HOST= CT= to ask a container for its own."
            )
        try:
            resolved = load_recipe(recipe, parse_overrides(override or ()))
        except PayloadError as error:
            raise UsageError(error.message, error.hint) from None
        found = estimate_here(resolved, config)
    if as_json:
        console.json({"recipe": resolved.name, "estimates": found})
    else:
        show_estimates(console, resolved, found)
