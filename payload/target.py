"""The frozen target model: token ids to context features, embeddings, output head, and cached decoding steps.

A feature of layer i is the raw output of that layer (the residual stream), for every layer, the last one too.
Of transformers' ``output_hidden_states`` it is entry i + 1, except for the last layer, where that entry has
the final norm applied and the feature has not.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from payload.errors import PayloadError
from payload.places import place, place_or_hub_name
from payload.recipe import TargetSpec
from payload.row_cache import RowCache
from payload.target_attention import ATTENTION, DocumentMask, mask_for, register

SUPPORTED_FAMILIES = {
    "qwen3": "Qwen3",
    "qwen2": "Qwen2 and Qwen2.5",
    "llama": "Llama, SmolLM and SmolLM2",
    "smollm3": "SmolLM3",
}


class CachedStep(NamedTuple):
    """``logits[B, T, V]``, or [B, 1, V] of the last token alone; ``features[B, T, n*H]`` of all tokens."""

    logits: Tensor
    features: Tensor


class Target:
    """A causal language model of a supported family, frozen and in evaluation mode.

    ``model`` is the transformers model. ``compiled`` compiles its layers for `features`, one graph for all of them
    and for each shape of the input. Raises PayloadError (kind "refused") for any other family.
    """

    def __init__(self, model: Any, compiled: bool = False) -> None:
        _check_family(model.config.model_type)
        self.model = model.eval().requires_grad_(False)
        register()
        self.model.set_attn_implementation(ATTENTION)
        self._run_layer = torch.compile(_run_layer, dynamic=False, fullgraph=True) if compiled else _run_layer
        self._takes_cache_as = (
            "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        )

    @classmethod
    def load(cls, spec: TargetSpec, device: torch.device | str = "cpu", compiled: bool = False) -> Target:
        """The model that ``spec`` names: a folder, a hub id, or a GGUF file in either.

        Raises PayloadError when it cannot be found or read, lacks weights, or is of no supported family.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        name, options = _source(spec)
        dtype = spec.dtype if spec.dtype == "auto" else getattr(torch, spec.dtype)
        try:
            config = AutoConfig.from_pretrained(name, **options)
            _check_family(config.model_type)
            if spec.random_weights:
                return cls(random_model(config, dtype, device), compiled)
            model, report = AutoModelForCausalLM.from_pretrained(
                name,
                dtype=dtype,
                attn_implementation="sdpa",
                output_loading_info=True,
                **options,
                **(_unpacked() if spec.gguf_file is not None else {}),
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            raise PayloadError(
                f"the target {spec.model} could not be loaded: there is no folder {place(spec.model)}, and as a name "
                f"of the hub: {_first_line(error)}"
                if not place(spec.model).is_dir()
                else f"the target in {place(spec.model)} could not be loaded: {_first_line(error)}",
                "give a folder with config.json and weights (or gguf_file), or a hub name that can be reached",
            ) from error
        if missing := sorted(report["missing_keys"]):
            raise PayloadError(
                f"the target {spec.model} lacks {len(missing)} weights, {missing[0]} first",
                "the folder is incomplete or holds another architecture than its config.json says",
            )
        return cls(model.to(device), compiled)

    @property
    def config(self) -> Any:
        """transformers' config of the model."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_weight.dtype

    @property
    def embedding_weight(self) -> Tensor:
        """[V, H]."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def head_weight(self) -> Tensor:
        """[V, H]; with tied embeddings the same tensor as `embedding_weight`."""
        weight = self.model.get_output_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    @torch.no_grad()
    def features(
        self,
        input_ids: Tensor,
        layer_ids: Sequence[int],
        *,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Outputs of the layers ``layer_ids``, side by side, [B, S, n*H]; nothing beyond the deepest one is
        run.

        ``input_ids[B, S]``; ``position_ids[B, S]``, by default 0 .. S-1. With ``document_ids[B, S]`` a token
        sees earlier tokens of its own document alone, padding (-1) counting as one more document; without,
        all earlier tokens of its row, which is right for rows of one document padded on the right.
        """
        return self._collect(input_ids, layer_ids, max(layer_ids) + 1, document_ids, position_ids)[0]

    @torch.no_grad()
    def features_and_final(
        self,
        input_ids: Tensor,
        layer_ids: Sequence[int],
        *,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`features`, and the last norm's output [B, S, H], which the head turns into logits."""
        depth = len(self.model.model.layers)
        features, last = self._collect(input_ids, layer_ids, depth, document_ids, position_ids)
        final = self.model.model.norm(last)
        assert isinstance(final, Tensor)
        return features, final

    def _collect(
        self,
        input_ids: Tensor,
        layer_ids: Sequence[int],
        depth: int,
        document_ids: Tensor | None,
        position_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`features`, and the output [B, S, H] of the last of ``depth`` layers; no other output outlives its layer."""
        width = self.embedding_weight.shape[1]
        features = self.embedding_weight.new_empty(*input_ids.shape, len(layer_ids) * width)
        slots = features.unflatten(-1, (len(layer_ids), width))
        hidden = features[..., :0]
        for index, hidden in enumerate(self._layer_outputs(input_ids, depth, document_ids, position_ids)):
            for slot, wanted in enumerate(layer_ids):
                if wanted == index:
                    slots[:, :, slot] = hidden
        return features, hidden

    def new_cache(self) -> Any:
        """An empty key/value cache that keeps every token: the newest can be taken back."""
        from transformers import DynamicCache

        return DynamicCache()

    @torch.no_grad()
    def step(
        self, input_ids: Tensor, cache: Any, layer_ids: Sequence[int] = (), last_logits_only: bool = False
    ) -> CachedStep:
        """Runs ``input_ids[B, T]``, which follow what ``cache`` holds, through the whole model, and caches them."""
        past = cache.get_seq_length()
        positions = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)
        with self._captured(layer_ids) as captured:
            output = self.model.model(
                input_ids=input_ids,
                position_ids=positions.expand(input_ids.shape[0], -1),
                use_cache=True,
                **{self._takes_cache_as: cache},
            )
        hidden = output.last_hidden_state
        logits = self.model.lm_head(hidden[:, -1:] if last_logits_only else hidden)
        features = (
            torch.cat([captured[index] for index in layer_ids], dim=-1) if layer_ids else hidden[..., :0]
        )
        return CachedStep(logits, features)

    @torch.no_grad()
    def step_rows(
        self,
        input_ids: Tensor,
        cache: RowCache,
        layer_ids: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> CachedStep:
        """`step` for rows of different lengths: ``input_ids[B, T]`` follow what each row of ``cache`` holds.

        The rows are as long as before until ``cache.advance``. With ``logits_at[B]``, the logits [B, 1, V] of that
        token of each row alone.
        """
        base = self.model.model
        count = input_ids.shape[1]
        windows = [self._window(index) for index in range(len(base.layers))]
        masks = {window: cache.visible(count, window) for window in set(windows)}
        hidden = base.embed_tokens(input_ids)
        rotary = base.rotary_emb(hidden, cache.positions(count))
        outputs: dict[int, Tensor] = {}
        for index, (layer, window) in enumerate(zip(base.layers, windows, strict=True)):
            hidden = layer(
                hidden,
                attention_mask=masks[window],
                position_embeddings=rotary,
                **{self._takes_cache_as: cache},
            )
            if index in layer_ids:
                outputs[index] = hidden
        normed = base.norm(hidden)
        if logits_at is not None:
            normed = normed.gather(1, logits_at[:, None, None].expand(-1, -1, normed.shape[-1]))
        features = (
            torch.cat([outputs[index] for index in layer_ids], dim=-1) if layer_ids else hidden[..., :0]
        )
        return CachedStep(self.model.lm_head(normed), features)

    @contextmanager
    def _captured(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Fills a dictionary with the outputs of these layers while the model runs."""
        captured: dict[int, Tensor] = {}

        def keep(index: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                captured[index] = output

            return hook

        layers = self.model.model.layers
        handles = [layers[index].register_forward_hook(keep(index)) for index in layer_ids]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def _layer_outputs(
        self, input_ids: Tensor, depth: int, document_ids: Tensor | None, position_ids: Tensor | None
    ) -> Iterator[Tensor]:
        """The outputs of the first ``depth`` layers, [B, S, H] each, in turn."""
        base = self.model.model
        if not 0 < depth <= len(base.layers):
            raise PayloadError(
                f"the target has {len(base.layers)} layers, and layer {depth - 1} was asked for",
                "layers count from 0",
                kind="usage",
            )
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        windows = [self._window(index) for index in range(depth)]
        masks = {window: mask_for(input_ids, document_ids, window) for window in set(windows)}
        hidden = base.embed_tokens(input_ids)
        rotary = base.rotary_emb(hidden, position_ids)
        for layer, window in zip(base.layers[:depth], windows, strict=True):
            hidden = self._run_layer(layer, hidden, masks[window], rotary)
            yield hidden

    def _window(self, layer: int) -> int | None:
        types = getattr(self.config, "layer_types", None)
        sliding = types is not None and types[layer] == "sliding_attention"
        return int(self.config.sliding_window) if sliding else None


def _run_layer(layer: nn.Module, hidden: Tensor, mask: DocumentMask, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """One layer's output [B, S, H], from ``hidden[B, S, H]`` and the cosines and sines of its positions."""
    output = layer(hidden, attention_mask=mask, position_embeddings=rotary)
    assert isinstance(output, Tensor)
    return output


def random_model(config: Any, dtype: torch.dtype | str, device: torch.device | str) -> Any:
    """A model of ``config`` with random weights, the same on every rank; ``dtype`` auto is the config's own."""
    from transformers import AutoModelForCausalLM

    device = torch.device(device)
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def _source(spec: TargetSpec) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {}
    if spec.trust_remote_code:
        options["trust_remote_code"] = True
    folder = place(spec.model)
    if spec.gguf_file is not None:
        options["gguf_file"] = spec.gguf_file
        if folder.is_dir() and not (folder / spec.gguf_file).is_file():
            raise PayloadError(f"the target's folder {folder} holds no {spec.gguf_file}", kind="usage")
    return place_or_hub_name(spec.model), options


def _unpacked() -> dict[str, Any]:
    """Options that have a GGUF file's weights unpacked to plain tensors: drafters share the embedding and the head.

    Newer transformers would keep them packed where it has kernels for that, which it looks for on the hub; older ones
    always unpack.
    """
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _check_family(model_type: str) -> None:
    if model_type not in SUPPORTED_FAMILIES:
        supported = "; ".join(f"{name} ({kind})" for kind, name in SUPPORTED_FAMILIES.items())
        raise PayloadError(
            f"targets of type {model_type} are not supported", f"supported: {supported}", kind="refused"
        )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
