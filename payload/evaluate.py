"""Held-out accepted length of a drafter by real speculative decoding, as a command.

``python -m payload.evaluate`` answers one request of the agent's protocol. Its fields:

- ``recipe``: the resolved recipe (its target and ``data.eval`` are used);
- ``drafter``: a drafter's folder in z-lab's format, or a run's folder, whose newest whole checkpoint is taken; a
  relative path counts from the root;
- ``prompts``: a JSONL file instead of the recipe's held-out rows;
- ``max_new_tokens``, ``temperature``, ``seed``: by default the recipe's length, 0 (greedy) and 0;
- ``device``: ``cuda`` or ``cpu``; missing takes the GPU when there is one.

The result: ``{"accepted_length", "accepted_by_position", "prompts", "tokens", "target_forwards", "seconds",
"plain_seconds", "speedup", "identical", "drafter", "temperature"}``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from payload.agent.protocol import Events, Request, serve
from payload.data.sealed import open_sealed
from payload.data.tokens import load_tokenizer
from payload.decode import evaluate
from payload.demo.target import ensure_demo_target
from payload.drafter.checkpoint import load_drafter
from payload.errors import PayloadError
from payload.recipe import Recipe, recipe_from_dict
from payload.target import Target
from payload.trainer.checkpoint import checkpoint_folders
from payload.trainer.heldout import held_out_prompts


def run_evaluation(request: Request, events: Events) -> dict[str, Any]:
    """Handle one request (see the module). Raises PayloadError when drafter, target or prompts are missing."""
    recipe = _with_prompts(recipe_from_dict(request.need("recipe", dict)), request)
    device = torch.device(request.get("device", str) or ("cuda" if torch.cuda.is_available() else "cpu"))
    folder = find_drafter(Path(request.root) / request.need("drafter", str), events)
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
    held_out = held_out_prompts(recipe, load_tokenizer(spec), target.config)
    temperature = request.get("temperature", float) or 0.0
    events.progress(f"decoding {len(held_out.prompts)} prompts")
    generator = torch.Generator(device=device).manual_seed(request.get("seed", int) or 0)
    result = evaluate(
        target,
        drafter.eval(),
        held_out.prompts,
        request.get("max_new_tokens", int) or recipe.train.eval_max_new_tokens,
        temperature,
        eos_token_ids=held_out.eos_token_ids,
        generator=generator,
    )
    measured = dict(vars(result))
    return {
        "accepted_length": measured.pop("mean_accepted_length"),
        "accepted_by_position": list(measured.pop("by_position")),
        **measured,
        "drafter": str(folder),
        "temperature": temperature,
    }


def find_drafter(path: Path, events: Events) -> Path:
    """The drafter's folder that ``path`` is, or that the newest whole checkpoint of the run ``path`` holds."""
    if (path / "config.json").is_file():
        return path
    for _, folder in sorted(checkpoint_folders(path / "checkpoints").items(), reverse=True):
        try:
            open_sealed(folder)
        except PayloadError as error:
            events.note(f"warning: passed over: {error.message}")
            continue
        return folder / "drafter"
    raise PayloadError(
        f"There is no drafter in {path}: neither an export nor a run with a whole checkpoint.",
        hint="Name a folder with config.json and model.safetensors, or a run that has written a checkpoint.",
        kind="usage",
    )


def _with_prompts(recipe: Recipe, request: Request) -> Recipe:
    prompts = request.get("prompts", str)
    if prompts is not None:
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
