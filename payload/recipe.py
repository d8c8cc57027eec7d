"""A recipe: everything that decides what a training run computes, as one frozen, validated value.

Sources of the defaults: the DFlash paper's hyper-parameters (block 16, 512 anchors, 5 layers, AdamW 6e-4 with a
cosine schedule and a warmup of 4 %, clipping at 1.0, decay gamma 7 for blocks of 16).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from payload.errors import PayloadError
from payload.located import Fault, Located, locate, refuse, shown
from payload.recipe_check import faults_of
from payload.yaml_binding import bind
from payload.yaml_reading import read_yaml

RECIPES = Path(__file__).parent / "recipes"

MAY_CHANGE_IN_A_RESUME = (
    "name",
    "compile",
    "topology",
    "train.log_every",
    "train.checkpoint_every",
    "train.eval_every",
    "train.keep_last",
    "train.prefetch",
    "train.shard",
    "train.on_recompile",
    "train.assert_improves",
)
"""How a run is logged, kept, spread over ranks and judged; all else decides what it computes."""

READ_BY_EVALUATION = (
    "target",
    "data.eval",
    "data.eval_rows",
    "data.max_length",
    "train.seed",
    "train.eval_max_new_tokens",
)
"""What of a recipe an evaluation reads: its drafter's shape comes with the weights."""


@dataclass(frozen=True)
class TargetSpec:
    """The frozen target: ``model`` is a folder, a hub name, or ``demo`` for the one that the demo trains."""

    model: str
    gguf_file: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    trust_remote_code: bool = False
    random_weights: bool = False
    """Build the model from its config alone: real shapes without real weights, for timing."""


@dataclass(frozen=True)
class DrafterSpec:
    """The drafter's shape; what is null follows the target."""

    num_layers: int = 5
    block_size: int = 16
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    layer_types: tuple[str, ...] | None = None
    """One for each layer, of ``payload.drafter.config.LAYER_TYPES``."""
    sliding_window: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    initializer_range: float = 0.02
    """Standard deviation of the first weights; about 1 / sqrt(hidden size) suits small targets."""


@dataclass(frozen=True)
class DataSpec:
    """Rows to learn from and held-out prompts: a JSONL path, ``hub:NAME[:SPLIT]``, or ``demo``."""

    train: tuple[str, ...]
    eval: tuple[str, ...] = ()
    train_rows: int | None = None
    eval_rows: int = 32
    max_length: int = 3072
    min_loss_tokens: int = 2
    regenerate: bool = False
    """Replace the answers of the training rows by the target's own before training."""
    regenerate_batch: int = 64
    regenerate_max_new_tokens: int = 1024
    regenerate_temperature: float = 0.0
    features: Literal["online", "offline"] = "online"


@dataclass(frozen=True)
class LossSpec:
    """The objective; a null ``gamma`` follows the block size (7 for 16, 5 for 10, 4 for 8)."""

    kind: Literal["ce", "dpace", "kl"] = "ce"
    gamma: float | None = None
    dpace_alpha: float = 0.5


@dataclass(frozen=True)
class OptimSpec:
    """AdamW and its schedule; ``warmup`` and ``decay`` are shares of all steps."""

    lr: float = 6e-4
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: float = 0.04
    decay: float = 0.2
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.0
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8


@dataclass(frozen=True)
class TrainSpec:
    """One optimizer step is ``batch_size * accumulation`` rows on each drafter."""

    steps: int
    from_pretrained: str | None = None
    """A drafter to begin with instead of random weights: its folder in z-lab's format, or ``runs/<run id>``, whose
    newest checkpoint is taken. Its weights alone: optimizer and schedule begin anew."""
    batch_size: int = 4
    num_anchors: int = 512
    accumulation: int = 1
    seed: int = 0
    log_every: int = 10
    checkpoint_every: int = 500
    """A checkpoint is also written where the held-out accepted length is the best so far, and at the end."""
    eval_every: int = 500
    eval_max_new_tokens: int = 256
    keep_last: int = 3
    prefetch: int = 2
    """How many steps the targets may be ahead of the drafters."""
    on_recompile: Literal["error", "count"] = "error"
    """What a compilation after the first step is: an error, or an alarm in the log and a count in the metrics."""
    shard: Literal["ddp", "fsdp2"] = "ddp"
    fp8: tuple[Literal["head", "mlp"], ...] = ()
    """What of the drafter's step is computed in FP8: the frozen head, the feed-forward layers (weight gradients
    never)."""
    assert_improves: bool = False
    """Fail the job unless the loss fell and the held-out accepted length rose clearly."""


@dataclass(frozen=True)
class TopologySpec:
    """Ranks by role; the same rank in both lists has both roles."""

    targets: tuple[int, ...] = (0,)
    drafters: tuple[int, ...] = (0,)

    @property
    def world_size(self) -> int:
        return max((*self.targets, *self.drafters)) + 1


@dataclass(frozen=True)
class Recipe:
    target: TargetSpec
    data: DataSpec
    train: TrainSpec
    drafter: DrafterSpec = field(default_factory=DrafterSpec)
    loss: LossSpec = field(default_factory=LossSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)
    topology: TopologySpec = field(default_factory=TopologySpec)
    compile: Literal["auto", "on", "off"] = "auto"
    name: str = "unnamed"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready data; ``recipe_from_dict`` turns it back into an equal recipe."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    def digest(self) -> str:
        """16 hex digits naming what the recipe computes, however it is logged and spread over ranks."""
        return hashlib.sha256(json.dumps(self._computed(), sort_keys=True).encode()).hexdigest()[:16]

    def changes_for_a_resume(self, other: Recipe) -> list[str]:
        """The keys in which ``other`` computes something else, so that it cannot go on from this one's checkpoint."""
        here, there = _flat(self._computed()), _flat(other._computed())
        return sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))

    def _computed(self) -> dict[str, Any]:
        """What decides the result. Of the topology only the number of micro-batches of all drafters together counts."""
        plain = self.to_dict()
        if plain["train"]["from_pretrained"] is None:
            # Runs from before there was a choice go on.
            plain["train"].pop("from_pretrained")
        plain["train"]["accumulation"] *= len(self.topology.drafters)
        for name in MAY_CHANGE_IN_A_RESUME:
            section, _, key = name.rpartition(".")
            (plain[section] if section else plain).pop(key)
        return plain


def _flat(plain: dict[str, Any]) -> dict[str, Any]:
    """``{"train": {"steps": 1}}`` as ``{"train.steps": 1}``."""
    return {
        f"{section}.{key}": value
        for section, values in plain.items()
        for key, value in (values.items() if isinstance(values, dict) else ())
    }


def load_recipe(path_or_name: str | Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read ``NAME`` of the shipped recipes or a YAML file, apply overrides, check the result.

    Overrides are ``{"train.steps": 10}`` or nested. Raises ``PayloadError`` (kind usage) with file:line on unknown
    keys and bad values.
    """
    path = Path(path_or_name)
    is_file_name = path.suffix in (".yaml", ".yml")
    if not is_file_name:
        path = RECIPES / f"{path_or_name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in RECIPES.glob("*.yaml")))
        missing = f"There is no file {path.absolute()}." if is_file_name else f"No recipe {path_or_name}."
        raise PayloadError(missing, hint=f"Name one of {known}, or a YAML file.", kind="usage")
    faults: list[Fault] = []
    located = read_yaml(path, faults)
    if isinstance(located.value, dict) and "name" not in located.value:
        located.value["name"] = dataclasses.replace(located, value=path.stem)
    return _checked_with(located, overrides, faults)


def recipe_from_dict(
    plain: dict[str, Any], where: str = "recipe", overrides: dict[str, Any] | None = None
) -> Recipe:
    """The recipe that ``to_dict`` wrote, with overrides as in ``load_recipe``.

    Raises ``PayloadError`` naming ``where`` if it is not one.
    """
    return _checked_with(locate(plain, where), overrides, [])


def _checked_with(located: Located, overrides: dict[str, Any] | None, faults: list[Fault]) -> Recipe:
    for key, value in (overrides or {}).items():
        keys = key.split(".")
        if len(keys) > 2:
            raise PayloadError(
                f"override: {shown(key)}: there is no such key.",
                hint="A key is section.name or name.",
                kind="usage",
            )
        located = _override(located, keys, locate(value, "override"))
    recipe = bind(Recipe, located, faults)
    refuse(faults_of(recipe, located))
    return recipe


def _override(located: Located, keys: list[str], value: Located) -> Located:
    mapping = dict(located.value) if isinstance(located.value, dict) else {}
    below = mapping.get(keys[0], dataclasses.replace(value, value={}))
    if len(keys) > 1:
        mapping[keys[0]] = _override(below, keys[1:], value)
    elif isinstance(value.value, dict):
        for key, item in value.value.items():
            below = _override(below, [key], item)
        mapping[keys[0]] = below
    else:
        mapping[keys[0]] = value
    return dataclasses.replace(located, value=mapping)
