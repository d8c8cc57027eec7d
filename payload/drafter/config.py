"""The drafter's configuration: shapes, attention rule, and what of the target it is bound to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from payload.errors import PayloadError

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class LayerType:
    """Who sees whom in a layer of this type, within what every layer may see at all (`payload.drafter.masks`).

    ``causal``: slots of a block see only themselves and earlier slots. ``windowed``: a query reaches back
    ``sliding_window`` tokens, its own counted.
    """

    causal: bool
    windowed: bool


LAYER_TYPES: dict[str, LayerType] = {
    FULL: LayerType(causal=False, windowed=False),
    SLIDING: LayerType(causal=True, windowed=True),
}
"""Every layer type. Masks, decoding, the recipe's check and the exported flags follow this table."""


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that fixes the drafter's shapes and attention rule.

    ``hidden_size`` and ``vocab_size`` are the target's. ``target_layer_ids`` count target layers from 0 and
    mean the output of that layer (``hidden_states[id + 1]`` of transformers). ``sliding_window`` counts the
    query's own token, as in transformers. ``causal`` overrides, for all layers, whether a block's slots see
    only earlier slots (see `block_is_causal`); ``None`` leaves it to the layer's type. Raises PayloadError
    (kind "usage") when the values do not fit together.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 40960
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    causal: bool | None = None
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_layers)
        _check(self)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The layer types that occur, each once: one attention mask is built for each."""
        return tuple(dict.fromkeys(self.layer_types))

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        *,
        mask_token_id: int,
        num_layers: int = 5,
        block_size: int = 16,
        target_layer_ids: Sequence[int] | None = None,
        layer_types: Sequence[str] | None = None,
        sliding_window: int | None = None,
        causal: bool | None = None,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        embedding_rows: int | None = None,
    ) -> DrafterConfig:
        """A drafter shaped like ``target_config`` (transformers' config of the target).

        What is not given follows the target, except rotary scaling and multi-axis rotary settings, which a
        drafter never inherits, and a head size that is no power of two (KV pages of serving engines cannot
        hold it), which becomes 128. ``embedding_rows`` is the number of rows that the target's embedding
        really has, when it differs from ``vocab_size``: the mask token must be one of them.
        """
        layers = int(target_config.num_hidden_layers)
        heads = int(target_config.num_attention_heads)
        own_head_dim = getattr(target_config, "head_dim", None) or target_config.hidden_size // heads
        if head_dim is None:
            head_dim = own_head_dim if _is_power_of_two(own_head_dim) else 128
        ids = (
            default_target_layer_ids(layers, num_layers)
            if target_layer_ids is None
            else tuple(target_layer_ids)
        )
        return cls(
            hidden_size=int(target_config.hidden_size),
            intermediate_size=intermediate_size or int(target_config.intermediate_size),
            num_layers=num_layers,
            num_attention_heads=num_attention_heads or heads,
            num_key_value_heads=num_key_value_heads or int(target_config.num_key_value_heads or heads),
            head_dim=head_dim,
            vocab_size=embedding_rows or int(target_config.vocab_size),
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=ids,
            num_target_layers=layers,
            rms_norm_eps=float(target_config.rms_norm_eps),
            rope_theta=_target_rope_theta(target_config),
            max_position_embeddings=int(target_config.max_position_embeddings),
            layer_types=tuple(layer_types or ()),
            sliding_window=sliding_window,
            causal=causal,
            pad_token_id=optional_int(getattr(target_config, "pad_token_id", None)),
            bos_token_id=optional_int(getattr(target_config, "bos_token_id", None)),
            eos_token_ids=token_ids(getattr(target_config, "eos_token_id", None)),
        )


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """z-lab's choice: ``num_draft_layers`` ids from 1 to ``num_target_layers - 3``, rounded; one: the
    middle.

    36 and 5 give (1, 9, 17, 25, 33). Raises PayloadError when the target is too shallow for distinct ids.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    step = (last - first) / (num_draft_layers - 1)
    ids = tuple(round(first + step * i) for i in range(num_draft_layers))
    if last < first or len(set(ids)) < len(ids):
        raise PayloadError(
            f"a target of {num_target_layers} layers has no {num_draft_layers} distinct layers from 1 to {last}",
            "give drafter.target_layer_ids, or fewer drafter layers",
            kind="usage",
        )
    return ids


def block_is_causal(layer_type: str, config: DrafterConfig) -> bool:
    """Whether slots of a block see only themselves and earlier slots in a layer of this type.

    The mask, the decoder and the exported flags follow it. Full attention is bidirectional and sliding
    attention causal, unless ``config.causal`` says otherwise for all layers (vLLM
    ``_resolve_layer_attention``, z-lab ``Qwen3DFlashAttention``).
    """
    return LAYER_TYPES[layer_type].causal if config.causal is None else config.causal


def layer_window(layer_type: str, config: DrafterConfig) -> int | None:
    """Tokens that a query of this layer type reaches back, its own counted; ``None`` is without limit."""
    return config.sliding_window if LAYER_TYPES[layer_type].windowed else None


def _check(config: DrafterConfig) -> None:
    def usage(message: str, hint: str = "") -> PayloadError:
        return PayloadError(message, hint, kind="usage")

    for name in (
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "num_target_layers",
        "max_position_embeddings",
    ):
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise usage(f"{name} must be a positive integer, not {value!r}")
    if not isinstance(config.block_size, int) or config.block_size < 2:
        raise usage(f"block_size must be at least 2 (an anchor and one draft), not {config.block_size!r}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise usage(
            f"num_attention_heads {config.num_attention_heads} is no multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
    if config.head_dim % 2:
        raise usage(f"head_dim must be even for rotary embeddings, not {config.head_dim}")
    _check_layers(config, usage)
    _check_mask_token(config, usage)


def _check_layers(config: DrafterConfig, usage: Any) -> None:
    ids = config.target_layer_ids
    if not ids or any(not isinstance(i, int) or not 0 <= i < config.num_target_layers for i in ids):
        raise usage(
            f"target_layer_ids {list(ids)} must be layers of the target, 0 to {config.num_target_layers - 1}"
        )
    if list(ids) != sorted(set(ids)):
        raise usage(f"target_layer_ids {list(ids)} must ascend, each once")
    if len(config.layer_types) != config.num_layers:
        raise usage(f"layer_types has {len(config.layer_types)} entries for {config.num_layers} layers")
    unknown = sorted(set(config.layer_types) - LAYER_TYPES.keys())
    if unknown:
        raise usage(f"layer_types knows no {', '.join(unknown)}", f"each is {' or '.join(LAYER_TYPES)}")
    window = config.sliding_window
    windowed = [kind for kind in config.layer_types if LAYER_TYPES[kind].windowed]
    if windowed and (not isinstance(window, int) or window < 1):
        raise usage(f"a {windowed[0]} layer needs sliding_window >= 1, not {window!r}")


def _check_mask_token(config: DrafterConfig, usage: Any) -> None:
    mask = config.mask_token_id
    hint = "name a reserved row of the target's embedding that no text uses"
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < config.vocab_size:
        raise usage(
            f"mask_token_id {mask!r} is no row of the target's embedding (0 to {config.vocab_size - 1})", hint
        )
    special: dict[str, tuple[int | None, ...]] = {
        "pad": (config.pad_token_id,),
        "bos": (config.bos_token_id,),
        "eos": config.eos_token_ids,
    }
    for name, ids in special.items():
        if mask in ids:
            raise usage(f"mask_token_id {mask} is also the target's {name} token", hint)


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def optional_int(value: Any) -> int | None:
    return None if value is None else int(value)


def token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, (list, tuple)) else (int(value),)


def _target_rope_theta(target_config: Any) -> float:
    parameters = getattr(target_config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(target_config, "rope_theta", None) or 10_000.0)
