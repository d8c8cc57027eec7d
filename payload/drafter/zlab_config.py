"""z-lab's ``config.json``, written for every known reader and read strictly.

Readers disagree on where a key lives: ``block_size`` and the causal flag moved between the top level and
``dflash_config``, rotary settings between ``rope_theta`` and ``rope_parameters``. Both places are written; on
reading, either will do, and two that disagree are refused. Sources: z-lab/dflash ``dflash/model.py``, vLLM
``qwen3_dflash.py``, SGLang ``dflash_utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from payload.drafter.config import FULL, LAYER_TYPES, SLIDING, DrafterConfig, optional_int, token_ids
from payload.errors import PayloadError

ARCHITECTURE = "DFlashDraftModel"

# Keys of drafters that compute something else; each maps to the one value under which it changes nothing.
_UNSUPPORTED_DFLASH_KEYS: dict[str, Any] = {
    "conv_kernel_size": None,
    "conv_group_size": None,
    "selector_rank": None,
    "selector_top_k": None,
    "attention_sink_bias": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "sample_from_anchor": False,
}


def config_to_json(config: DrafterConfig) -> dict[str, Any]:
    """z-lab's ``config.json``, with each key in every place where a known reader looks for it."""
    sliding = any(LAYER_TYPES[kind].windowed for kind in config.layer_types)
    dflash: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
    }
    if config.causal is not None:
        dflash["causal"] = config.causal
    if sliding and all(kind == SLIDING for kind in config.layer_types):
        dflash |= {"use_swa": True, "swa_window_size": config.sliding_window}
    eos = list(config.eos_token_ids)
    content: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "bos_token_id": config.bos_token_id,
        "dflash_config": dflash,
        "dtype": "bfloat16",
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_target_layers": config.num_target_layers,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": sliding,
        "vocab_size": config.vocab_size,
    }
    if config.causal is not None:
        content["is_causal"] = config.causal
    return content


def config_from_json(content: Mapping[str, Any], source: str = "config.json") -> DrafterConfig:
    """Reads z-lab's ``config.json``, older and newer.

    Keys that do not concern a drafter are ignored. Raises PayloadError (kind "refused"), naming ``source``
    and the key, for what is missing, contradictory or asks for an architecture other than plain DFlash.
    """
    return _Reader(content, source).read()


class _Reader:
    """Looks keys up in the places where writers put them, and refuses contradictions."""

    def __init__(self, content: Mapping[str, Any], source: str) -> None:
        self.content = content
        self.source = source
        dflash = content.get("dflash_config")
        if not isinstance(dflash, Mapping):
            raise self.refusal("has no dflash_config", "it is not the config.json of a DFlash drafter")
        self.dflash: Mapping[str, Any] = dflash

    def refusal(self, what: str, hint: str = "") -> PayloadError:
        return PayloadError(f"{self.source} {what}", hint, kind="refused")

    def read(self) -> DrafterConfig:
        self._refuse_other_architectures()
        layers = self._required("num_hidden_layers")
        layer_types, window, causal = self._attention(layers)
        try:
            return DrafterConfig(
                hidden_size=self._required("hidden_size"),
                intermediate_size=self._required("intermediate_size"),
                num_layers=layers,
                num_attention_heads=self._required("num_attention_heads"),
                num_key_value_heads=self._required("num_key_value_heads"),
                head_dim=self.content.get("head_dim")
                or self._required("hidden_size") // self._required("num_attention_heads"),
                vocab_size=self._required("vocab_size"),
                block_size=self._agreed(
                    "block_size", self.dflash.get("block_size"), self.content.get("block_size")
                ),
                mask_token_id=self._required_dflash("mask_token_id"),
                target_layer_ids=tuple(self._required_dflash("target_layer_ids")),
                num_target_layers=self._required("num_target_layers"),
                rms_norm_eps=self.content.get("rms_norm_eps", 1e-6),
                rope_theta=self._rope_theta(),
                max_position_embeddings=self.content.get("max_position_embeddings", 40960),
                layer_types=layer_types,
                sliding_window=window,
                causal=causal,
                initializer_range=self.content.get("initializer_range", 0.02),
                pad_token_id=optional_int(self.content.get("pad_token_id")),
                bos_token_id=optional_int(self.content.get("bos_token_id")),
                eos_token_ids=token_ids(self.content.get("eos_token_id")),
            )
        except PayloadError as error:
            raise self.refusal(f"does not fit together: {error.message}", error.hint) from None

    def _refuse_other_architectures(self) -> None:
        architectures = self.content.get("architectures") or [ARCHITECTURE]
        if ARCHITECTURE not in architectures:
            raise self.refusal(f"is of {', '.join(architectures)}", f"only {ARCHITECTURE} is supported")
        for key, neutral in _UNSUPPORTED_DFLASH_KEYS.items():
            value = self.dflash.get(key, self.content.get(key, neutral))
            if value != neutral:
                raise self.refusal(f"sets {key} to {value!r}", f"only plain {ARCHITECTURE} is supported")
        for key, only in (("attention_bias", False), ("hidden_act", "silu"), ("tie_word_embeddings", False)):
            if self.content.get(key, only) != only:
                raise self.refusal(f"sets {key} to {self.content[key]!r}", f"only {only!r} is supported")

    def _attention(self, layers: int) -> tuple[tuple[str, ...], int | None, bool | None]:
        causal = self._agreed(
            "causal", self.dflash.get("causal"), self.content.get("is_causal"), required=False
        )
        layer_types = tuple(self.content.get("layer_types") or (FULL,) * layers)
        if self.dflash.get("use_swa") and SLIDING not in layer_types:
            # The flag alone, without layer types, means sliding layers that are not causal (vLLM's table).
            layer_types = (SLIDING,) * layers
            causal = False if causal is None else causal
        if not any(LAYER_TYPES[kind].windowed for kind in layer_types if kind in LAYER_TYPES):
            return layer_types, None, causal
        window = self._agreed(
            "sliding_window", self.dflash.get("swa_window_size"), self.content.get("sliding_window")
        )
        return layer_types, window, causal

    def _rope_theta(self) -> float:
        scaling = self.content.get("rope_scaling")
        parameters = self.content.get("rope_parameters") or {}
        for settings in (scaling or {}, parameters):
            kind = settings.get("rope_type", settings.get("type", "default"))
            if kind != "default" or "mrope_section" in settings:
                raise self.refusal(
                    f"asks for rotary scaling {dict(settings)!r}", "only plain rotary is supported"
                )
        return float(self._agreed("rope_theta", self.content.get("rope_theta"), parameters.get("rope_theta")))

    def _agreed(self, name: str, *values: Any, required: bool = True) -> Any:
        given = [value for value in values if value is not None]
        if not given:
            if required:
                raise self.refusal(f"does not say {name}")
            return None
        if any(value != given[0] for value in given):
            raise self.refusal(f"says {name} twice and differently: {', '.join(map(repr, given))}")
        return given[0]

    def _required(self, key: str) -> Any:
        if self.content.get(key) is None:
            raise self.refusal(f"lacks {key}")
        return self.content[key]

    def _required_dflash(self, key: str) -> Any:
        return self._agreed(f"dflash_config.{key}", self.dflash.get(key), self.content.get(key))
