"""The commands of `orchestrator cache`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from orchestrator.cache import list_caches, prune_caches, show_cache, show_caches, verify_cache
from orchestrator.cli_options import (
    CtOption,
    FingerprintArgument,
    HostOption,
    InventoryOption,
    JsonOption,
    open_step,
)
from orchestrator.console import Console, size_text
from orchestrator.errors import RemoteError, UsageError
from orchestrator.inventory import DEFAULT_INVENTORY


class _Actions(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = ", ".join(self.list_commands(ctx))
        if args and self.get_command(ctx, args[0]) is None:
            raise UsageError(f"cache: there is no action {args[0]!r}.", f"ACTION= is one of {known}.")
        return super().resolve_command(ctx, args)


cache_app = typer.Typer(cls=_Actions, no_args_is_help=True, help="A container's compile caches.")


@cache_app.command("list")
def cache_list(
    host: HostOption = None,
    ct: CtOption = None,
    inventory: InventoryOption = DEFAULT_INVENTORY,
    as_json: JsonOption = False,
) -> None:
    """Show the container's compile caches: size, state, and the runs that pin them."""
    console = Console()
    with open_step("cache", console, host, ct, inventory) as (agent, report):
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
    with open_step("cache", console, host, ct, inventory) as (agent, report):
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
    with open_step("cache", console, host, ct, inventory) as (agent, report):
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
    with open_step("cache", console, host, ct, inventory) as (agent, report):
        pruned = prune_caches(agent, report, apply=apply)
        names = ", ".join(pruned["removed"]) or "none"
        report.outcome = f"{'removed' if apply else 'would remove'}: {names} ({size_text(pruned['bytes'])})"
