"""Held-out accepted length of a drafter by real speculative decoding, as a command.

``python -m payload.evaluate`` answers one request of the agent's protocol. Its fields:

- ``drafter``: a drafter's folder in z-lab's format, or a run's folder; a relative path counts from the root;
- ``checkpoint``: of a run, ``newest`` (the default), ``best`` by held-out accepted length, or a step's number;
- ``recipe``: the resolved recipe (its target and ``data.eval`` are used); missing takes the run's own;
- ``overrides``: values of the recipe to change, as ``{"data.eval_rows": 8}``;
- ``prompts``: a JSONL file instead of the recipe's held-out rows;
- ``max_new_tokens``, ``temperature``, ``seed``: by default the recipe's length, 0 (greedy) and 0;
- ``at_once``: how many prompts are decoded together when greedy; 1 tells the speed of serving one person;
- ``device``: ``cuda`` or ``cpu``; missing takes the GPU when there is one.

The result: ``{"accepted_length", "accepted_by_position", "prompts", "tokens", "target_forwards", "seconds",
"plain_seconds", "speedup", "identical", "drafter", "temperature"}``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from payload.agent.durable import read_json
from payload.agent.protocol import Events, Request, serve
from payload.agent.usage import using
from payload.data.tokens import load_tokenizer
from payload.demo.target import ensure_demo_target
from payload.drafter.checkpoint import load_drafter
from payload.errors import PayloadError
from payload.places import place
from payload.recipe import Recipe, recipe_from_dict
from payload.target import Target
from payload.trainer.checkpoint import find_drafter
from payload.trainer.heldout import PROMPTS_AT_ONCE, Sampling, held_out_prompts, measure


def run_evaluation(request: Request, events: Events) -> dict[str, Any]:
    """Handle one request (see the module). Raises PayloadError when drafter, target or prompts are missing."""
    named = Path(request.root) / request.need("drafter", str)
    with using(named) if named.is_dir() else contextlib.nullcontext():
        return _evaluated(named, request, events)


def _evaluated(named: Path, request: Request, events: Events) -> dict[str, Any]:
    folder = find_drafter(named, request.get("checkpoint", str) or "newest", events.note)
    recipe = _with_prompts(_recipe(request, named), request)
    device = torch.device(request.get("device", str) or ("cuda" if torch.cuda.is_available() else "cpu"))
    spec = recipe.target
    if spec.model == "demo":
        spec = replace(spec, model=str(ensure_demo_target(Path(request.root), events.progress)))
    events.progress("loading the target")
    target = Target.load(spec, device)
    drafter, config = load_drafter(folder, device=device, dtype=target.dtype)
    if (
        config.hidden_size != target.config.hidden_size
        or config.num_target_layers != target.config.num_hidden_layers
    ):
        raise PayloadError(
            f"The drafter in {folder} is not one of this target.",
            hint="Give the recipe with which it was trained.",
            kind="refused",
        )
    held_out = held_out_prompts(recipe, load_tokenizer(spec), target.model.generation_config, events.note)
    temperature = request.get("temperature", float) or 0.0
    generator = torch.Generator(device=device).manual_seed(request.get("seed", int) or 0)
    result = measure(
        target,
        drafter.eval(),
        held_out,
        request.get("max_new_tokens", int) or recipe.train.eval_max_new_tokens,
        compare_plain=True,
        on_progress=lambda done, total: events.progress("decoding the prompts", done, total),
        sampling=Sampling(temperature, generator),
        at_once=request.get("at_once", int) or PROMPTS_AT_ONCE,
    )
    assert result is not None, "nothing stops it"
    return {
        "accepted_length": result.mean_accepted_length,
        "accepted_by_position": list(result.by_position),
        "prompts": result.prompts,
        "tokens": result.tokens,
        "target_forwards": result.target_forwards,
        "seconds": result.seconds,
        "plain_seconds": result.plain_seconds,
        "speedup": result.speedup,
        "identical": result.identical,
        "drafter": str(folder),
        "temperature": temperature,
    }


def _recipe(request: Request, drafter: Path) -> Recipe:
    overrides = request.get("overrides", dict) or {}
    recipe = request.get("recipe", dict)
    if recipe is not None:
        return recipe_from_dict(recipe, overrides=overrides)
    try:
        return recipe_from_dict(read_json(drafter / "spec.json")["recipe"], f"{drafter}/spec.json", overrides)
    except (OSError, KeyError, TypeError):
        raise PayloadError(
            f"{drafter} is not the folder of a run, so the recipe that it was trained with is not known.",
            "Give a run, or the recipe.",
            kind="usage",
        ) from None


def _with_prompts(recipe: Recipe, request: Request) -> Recipe:
    prompts = request.get("prompts", str)
    if prompts is not None:
        if not prompts.startswith("hub:") and prompts != "demo" and not place(prompts).is_file():
            raise PayloadError(
                f"There is no file {place(prompts)} of prompts in the container.",
                hint=f"PROMPTS= is a JSONL file below the container's root. Bring it: make put FILE=<prompts.jsonl> "
                f"TO={prompts}",
                kind="usage",
            )
        recipe = replace(recipe, data=replace(recipe.data, eval=(prompts,)))
    if not recipe.data.eval:
        raise PayloadError(
            "There are no held-out prompts.",
            hint="Set data.eval in the recipe, or give prompts.",
            kind="usage",
        )
    return recipe


def main(arguments: Sequence[str]) -> int:
    """The module's entry: takes no arguments, the request comes on stdin."""
    if arguments:
        sys.stderr.write("payload.evaluate takes its request on stdin, no arguments\n")
        return 2
    return serve(run_evaluation)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
