"""The model card of an exported drafter: what it was trained with, on what, and what it reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from payload.drafter.config import DrafterConfig


def model_card(
    config: DrafterConfig, recipe: Mapping[str, Any], data: Mapping[str, Any], metrics: Mapping[str, Any]
) -> str:
    """The card's Markdown. ``recipe`` is ``Recipe.to_dict()``; ``data`` and ``metrics`` become tables, nested
    keys joined by dots."""
    target = recipe.get("target", {}).get("model", "its target")
    sections = [
        _front_matter(target),
        f"# DFlash drafter for {target}",
        f"It drafts blocks of {config.block_size} tokens ({config.block_size - 1} drafts after an anchor) with "
        f"{config.num_layers} layers, from the outputs of the target's layers "
        f"{', '.join(map(str, config.target_layer_ids))} (counted from 0). Mask token: {config.mask_token_id}. "
        "It works only with this target, whose embedding and output head it uses, and what it decodes is the "
        "target's own text.",
        "## Serving",
        _serving(config.block_size),
        "## Metrics",
        _table(metrics),
        "## Data",
        _table(data),
        "## Recipe",
        _table(recipe),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(target: str) -> str:
    base = [f"base_model: {target}"] if target.count("/") == 1 and not target.startswith((".", "/")) else []
    return "\n".join(
        ["---", *base, "library_name: transformers", "tags: [dflash, speculative-decoding]", "---"]
    )


def _serving(block_size: int) -> str:
    return (
        "Not tried by the project that trained this drafter: `config.json` and `model.safetensors` are written in "
        "z-lab's format, which these engines document for DFlash drafters. By their documentation the options are, for "
        "vLLM, `--speculative-config "
        f'\'{{"method": "dflash", "model": "<this folder>", "num_speculative_tokens": {block_size - 1}}}\'`, '
        "and for SGLang, `--speculative-algorithm DFLASH --speculative-draft-model-path <this folder>`."
    )


def _table(values: Mapping[str, Any]) -> str:
    rows = [f"| {key} | {_shown(value)} |" for key, value in _flat(values)]
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else "None recorded."


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        rows += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value))
    return str(value).replace("|", "\\|").replace("\n", " ")
