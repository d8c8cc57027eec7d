"""The sizes of a target, from its config.json or from what is known of published models; no torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.errors import PayloadError

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class TargetShape:
    """A target's sizes, under the names that transformers' configs have, so that either describes a target."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    dtype: str = "float32"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40_960

    @classmethod
    def of_config(cls, config: Mapping[str, Any], where: str) -> TargetShape:
        """From the contents of a config.json. Raises PayloadError naming ``where`` when it lacks a size."""
        try:
            heads = int(config["num_attention_heads"])
            return cls(
                hidden_size=int(config["hidden_size"]),
                intermediate_size=int(config["intermediate_size"]),
                num_hidden_layers=int(config["num_hidden_layers"]),
                num_attention_heads=heads,
                num_key_value_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
                vocab_size=int(config["vocab_size"]),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PayloadError(
                f"{where} does not give the target's sizes: {error}",
                "It must be the config.json of a Qwen3, Qwen2 or Llama model.",
                kind="usage",
            ) from error

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: attention's four matrices, the MLP's three, and norms."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return self.hidden_size * (2 * queries + 2 * keys + 3 * self.intermediate_size + 2)

    @property
    def parameters(self) -> int:
        """All weights, tied embeddings once."""
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * self.layer_parameters + tables * self.vocab_size * self.hidden_size

    def itemsize(self, dtype: str) -> int:
        """Bytes of a number in ``dtype`` of a recipe; ``auto`` is the config's own."""
        return _BYTES.get(self.dtype if dtype == "auto" else dtype, 4)


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, tied: bool = False) -> TargetShape:
    return TargetShape(hidden, intermediate, layers, heads, 8, 128, 151_936, tied, "bfloat16")


PUBLISHED: Mapping[str, TargetShape] = {
    # The one that the demo trains; `payload.demo.target.CONFIG`.
    "demo": TargetShape(96, 256, 5, 4, 2, 24, 512, True, "float32", 1e-6, 1024),
    # From the config.json of each on its hub.
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 12_288),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 40, 17_408),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 25_600),
    "meta-llama/Llama-3.1-8B-Instruct": TargetShape(
        4096, 14_336, 32, 32, 8, 128, 128_256, False, "bfloat16", 1e-5, 131_072
    ),
}


def shape_of(model: str, config: Path | None = None) -> TargetShape:
    """The sizes of ``model`` of a recipe: from ``config`` (a config.json, or the folder that holds one), from the
    folder that ``model`` names, or from what is published.

    Raises PayloadError (kind ``usage``) when none of them knows.
    """
    path = config if config is not None else Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            return TargetShape.of_config(json.loads(path.read_text(encoding="utf-8")), str(path))
        except ValueError as error:
            raise PayloadError(f"{path} cannot be read: {error}", kind="usage") from error
    if config is None and model in PUBLISHED:
        return PUBLISHED[model]
    raise PayloadError(
        f"the sizes of the target {model} are not known here" if config is None else f"there is no {path}",
        "Name its config.json: --config <file or folder>; or ask the container that has it: HOST= CT=.",
        kind="usage",
    )
