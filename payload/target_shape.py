"""The sizes of a target, from its config.json or GGUF file, or from what is published; no torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.errors import PayloadError
from payload.gguf_shape import gguf_config
from payload.located import shown
from payload.places import at_home
from payload.recipe import TargetSpec

_GREATEST = 1 << 30
"""Of any one size: far more than any model has."""
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
    def of_config(cls, config: Any, where: str) -> TargetShape:
        """From the contents of a config.json. Raises PayloadError (kind ``usage``) naming ``where`` and the size that
        is missing or cannot be one."""
        if not isinstance(config, Mapping):
            raise _unfit(where, "it holds no JSON object")

        def size(key: str, default: int | None = None) -> int:
            value = config.get(key)
            if value is None and default is not None:
                return default
            if type(value) is not int or not 0 < value <= _GREATEST:
                said = "is missing" if value is None else f"is {shown(value)}"
                raise _unfit(where, f"{key} {said}, and must be a whole number from 1 to {_GREATEST:,}")
            return value

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        kind = config.get("dtype") or config.get("torch_dtype")
        return cls(
            hidden_size=hidden,
            intermediate_size=size("intermediate_size"),
            num_hidden_layers=size("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", max(1, hidden // heads)),
            vocab_size=size("vocab_size"),
            tie_word_embeddings=config.get("tie_word_embeddings") is True,
            dtype=kind if isinstance(kind, str) else "float32",
        )

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


def _smollm2(hidden: int, layers: int, heads: int, keys: int, intermediate: int) -> TargetShape:
    return TargetShape(hidden, intermediate, layers, heads, keys, 64, 49_152, True, "bfloat16", 1e-5, 8192)


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
    "HuggingFaceTB/SmolLM2-135M-Instruct": _smollm2(576, 30, 9, 3, 1536),
    "HuggingFaceTB/SmolLM2-360M-Instruct": _smollm2(960, 32, 15, 5, 2560),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _smollm2(2048, 24, 32, 32, 8192),
}


def shape_of(model: str, config: Path | None = None, gguf_file: str | None = None) -> TargetShape:
    """The sizes of ``model`` of a recipe: from ``config`` (a config.json, a GGUF file, or the folder that holds one),
    from the folder that ``model`` names, or from what is published. ``gguf_file`` is the model's file in its folder.

    Raises PayloadError (kind ``usage``) when none of them knows.
    """
    path = config if config is not None else at_home(model)
    if path.is_dir():
        gguf = path / gguf_file if gguf_file is not None else None
        path = gguf if gguf is not None and gguf.is_file() else path / "config.json"
    if path.is_file():
        content = gguf_config(path) if path.suffix == ".gguf" else _read_json(path)
        return TargetShape.of_config(content, str(path))
    published = PUBLISHED.get(model) or _published_gguf(gguf_file)
    if config is None and published is not None:
        return published
    raise PayloadError(
        f"the sizes of the target {model} are not known here" if config is None else f"there is no {path}",
        "Name its config.json or GGUF file: --config <file or folder>; or ask the container that has it: HOST= CT=.",
        kind="usage",
    )


def shape_of_target(spec: TargetSpec, config: Path | None = None) -> TargetShape:
    """`shape_of` the target of a recipe."""
    return shape_of(spec.model, config, spec.gguf_file)


def _published_gguf(gguf_file: str | None) -> TargetShape | None:
    """The published model whose name, without its owner, a GGUF file has before the name of its quantization."""
    by_name = {name.rpartition("/")[2].lower(): shape for name, shape in PUBLISHED.items()}
    stem = Path(gguf_file or "").name.lower().removesuffix(".gguf")
    return by_name.get(stem) or by_name.get(stem.rpartition(".")[0]) or by_name.get(stem.rpartition("-")[0])


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PayloadError(f"{path} cannot be read: {error.strerror}", kind="usage") from error
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise PayloadError(f"{path} cannot be read: {why}", kind="usage") from error


def _unfit(where: str, why: str) -> PayloadError:
    return PayloadError(
        f"{where} does not give the target's sizes: {why}",
        "It must be of a Qwen3, Qwen2 or Llama model.",
        kind="usage",
    )
