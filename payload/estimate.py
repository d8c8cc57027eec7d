"""How much GPU memory each role of a recipe will need, by arithmetic: no torch, nothing allocated.

A rank goes through phases, one after the other: the target answers the prompts, steps are trained, held-out prompts
are decoded. What it needs is the greatest of their peaks, as torch counts allocated memory; what CUDA and its libraries
take besides is a term of its own. The terms are in `payload.estimate_terms`.

``python -m payload.estimate`` answers one request of the agent's protocol with the field ``recipe`` (resolved): the
target's config and the prompts are then read where the recipe says they are. The result is `describe_estimates`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from payload.agent.protocol import Events, Request, serve
from payload.errors import PayloadError
from payload.estimate_terms import NOT_KNOWN, PromptTokens, Sizes, Term, drafter_config, drafter_parameters
from payload.places import place, place_or_hub_name
from payload.recipe import Recipe, recipe_from_dict
from payload.target_shape import TargetShape, shape_of_target

__all__ = ["Estimate", "Phase", "describe_estimates", "drafter_config", "drafter_parameters", "estimate"]

Role = Literal["target", "drafter", "both"]

GPU_BYTES = {24: 24_564 << 20, 48: 46_068 << 20, 80: 81_559 << 20, 141: 143_771 << 20}
"""Memory by a card's nominal GB, as the smallest card of that name reports it."""

_OUTSIDE_TORCH = 1 << 30
"""CUDA's context, cuBLAS's workspaces and NCCL's buffers."""
_FRAGMENTS = 0.04
"""Of torch's memory, what its allocator holds and cannot use."""


@dataclass(frozen=True)
class Phase:
    """A part of a rank's life, and what its peak consists of."""

    name: str
    terms: tuple[Term, ...]

    @property
    def allocated_bytes(self) -> int:
        """The peak that torch will report as allocated."""
        return sum(term.size_bytes for term in self.terms)


@dataclass(frozen=True)
class Estimate:
    """The memory of one rank of a role."""

    role: Role
    ranks: tuple[int, ...]
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        """The phase that needs the most."""
        return max(self.phases, key=lambda phase: phase.allocated_bytes)

    @property
    def needed_bytes(self) -> int:
        """What a GPU must have: with fragments, and with what is outside torch."""
        return int(self.peak.allocated_bytes * (1 + _FRAGMENTS)) + _OUTSIDE_TORCH

    @property
    def cards(self) -> tuple[int, ...]:
        """The nominal sizes of `GPU_BYTES` that hold it."""
        return tuple(size for size, there in GPU_BYTES.items() if self.needed_bytes <= there)

    def phase(self, name: str) -> Phase:
        """The phase of that name, which must be one of this role's."""
        return next(phase for phase in self.phases if phase.name == name)


ANSWERS, STEP, EVALUATION = "answering prompts", "a training step", "an evaluation"


def estimate(recipe: Recipe, target: TargetShape, prompts: PromptTokens = NOT_KNOWN) -> list[Estimate]:
    """An estimate for each role that occurs among the recipe's ranks. Raises PayloadError for a drafter that does not
    fit the target."""
    sizes = Sizes(recipe, target, prompts)
    targets, drafters = set(recipe.topology.targets), set(recipe.topology.drafters)

    def phases(role: Role) -> Iterable[Phase]:
        if recipe.data.regenerate and role != "drafter":
            yield Phase(ANSWERS, tuple(sizes.answers()))
        step = {"target": sizes.target_alone, "drafter": sizes.drafter_alone, "both": sizes.both}[role]
        yield Phase(STEP, tuple(step()))
        if recipe.data.eval and role != "drafter":
            yield Phase(EVALUATION, tuple(sizes.evaluation(beside_drafter=role == "both")))

    of_role: list[tuple[Role, set[int]]] = [
        ("target", targets - drafters),
        ("drafter", drafters - targets),
        ("both", targets & drafters),
    ]
    return [Estimate(role, tuple(sorted(ranks)), tuple(phases(role))) for role, ranks in of_role if ranks]


def describe_estimates(estimates: Iterable[Estimate]) -> list[dict[str, Any]]:
    """Estimates as plain data. ``terms`` are those of the phase with the peak, ``phase``."""
    return [
        {
            "role": one.role,
            "ranks": list(one.ranks),
            "phase": one.peak.name,
            "phases": {phase.name: phase.allocated_bytes for phase in one.phases},
            "terms": {term.name: term.size_bytes for term in one.peak.terms},
            "allocated_bytes": one.peak.allocated_bytes,
            "needed_bytes": one.needed_bytes,
            "cards": list(one.cards),
        }
        for one in estimates
    ]


def answer(request: Request, events: Events) -> dict[str, Any]:
    """Handle one request (see the module). Raises PayloadError when the target's config cannot be read."""
    recipe = recipe_from_dict(request.need("recipe", dict))
    target = _shape_in_container(recipe)
    return {"estimates": describe_estimates(estimate(recipe, target, _prompts_in_container(recipe, events)))}


def _shape_in_container(recipe: Recipe) -> TargetShape:
    """The target's sizes where the target is: its own files, or what transformers makes of its name."""
    spec = recipe.target
    if place(spec.model).is_dir():
        return shape_of_target(spec, place(spec.model))
    try:
        return shape_of_target(spec)
    except PayloadError:
        pass
    from transformers import AutoConfig

    options = {"gguf_file": spec.gguf_file} if spec.gguf_file else {}
    try:
        config = AutoConfig.from_pretrained(
            place_or_hub_name(spec.model), trust_remote_code=spec.trust_remote_code, **options
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise PayloadError(
            f"the config of the target {spec.model} cannot be read: {next(iter(str(error).splitlines()), '')}",
            "Put the model into that folder, or name another: target.model=<folder or hub name>.",
        ) from error
    return TargetShape.of_config(config.to_dict(), spec.model)


def _prompts_in_container(recipe: Recipe, events: Events) -> PromptTokens:
    """The longest prompts of the recipe's data; unknown when they, or the target's folder, are not there."""
    if not (recipe.data.eval or recipe.data.regenerate) or not place(recipe.target.model).is_dir():
        return NOT_KNOWN
    from payload.trainer.longest import longest_prompts

    try:
        return longest_prompts(recipe)
    except PayloadError as error:
        events.note(f"the prompts' lengths are assumed: {error.message}")
        return NOT_KNOWN


if __name__ == "__main__":
    sys.exit(serve(answer))
