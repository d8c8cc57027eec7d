"""A drafter on disk, in z-lab's format: ``config.json`` and ``model.safetensors``, as vLLM, SGLang and z-lab
load it.

The names of tensors live only here and in the module's attributes, which are the same: ``fc.weight``,
``hidden_norm.weight``, ``norm.weight`` and eleven for each layer. No embedding, head or rotary table is
stored; they are the target's.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from payload.drafter.config import DrafterConfig
from payload.drafter.model import DFlashDrafter
from payload.drafter.zlab_config import config_from_json, config_to_json
from payload.errors import PayloadError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"
EXPORT_DTYPE = torch.bfloat16


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint: 3 + 11 for each layer (58 for 5 layers)."""
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        of_layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "mlp.gate_proj": (config.intermediate_size, hidden),
            "mlp.up_proj": (config.intermediate_size, hidden),
            "mlp.down_proj": (hidden, config.intermediate_size),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def save_drafter(
    folder: Path | str,
    drafter: DFlashDrafter | Mapping[str, Tensor],
    config: DrafterConfig,
    card: str | None = None,
) -> Path:
    """Writes the drafter (or its state dict, gathered already) to ``folder`` in bf16, all of it or nothing.

    The files are written beside, flushed to disk and renamed, so that ``folder`` never holds half a
    checkpoint; a folder that exists is replaced. ``card`` is the text of the model card. Raises PayloadError
    when tensors are not those of ``config``.
    """
    folder = Path(folder)
    state = drafter.state_dict() if isinstance(drafter, torch.nn.Module) else drafter
    _check_tensors(
        {name: tuple(tensor.shape) for name, tensor in state.items()}, config, "the drafter to save"
    )
    tensors = {name: tensor.detach().to("cpu", EXPORT_DTYPE).contiguous() for name, tensor in state.items()}

    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    beside.mkdir()
    try:
        save_file(tensors, beside / WEIGHTS_FILE, metadata={"format": "pt"})
        (beside / CONFIG_FILE).write_text(json.dumps(config_to_json(config), indent=2) + "\n", "utf-8")
        if card is not None:
            (beside / CARD_FILE).write_text(card, "utf-8")
        for path in (*beside.iterdir(), beside):
            _flush(path)
        _replace(beside, folder)
        _flush(folder.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return folder


def load_drafter(
    folder: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> tuple[DFlashDrafter, DrafterConfig]:
    """The drafter that ``folder`` holds, with the tensors' bits as stored where ``dtype`` is theirs.

    Raises PayloadError (kind "refused") naming the file and the key when anything is missing, left over, of
    another shape, or unreadable.
    """
    folder = Path(folder)
    config = load_config(folder)
    state = _read_tensors(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    _check_tensors(shapes, config, str(folder))
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    drafter.load_state_dict(
        {name: tensor.to(device, dtype) for name, tensor in state.items()}, strict=True, assign=True
    )
    return drafter, config


def load_config(folder: Path | str) -> DrafterConfig:
    """The configuration alone; raises like `load_drafter`."""
    path = Path(folder) / CONFIG_FILE
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise PayloadError(
            f"{path} does not exist", "give the folder of an exported drafter", kind="refused"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PayloadError(f"{path} could not be read: {error}", kind="refused") from error
    if not isinstance(content, dict):
        raise PayloadError(f"{path} holds no JSON object", kind="refused")
    return config_from_json(content, str(path))


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise PayloadError(
            f"{folder} holds no {WEIGHTS_FILE}", "the checkpoint is incomplete", kind="refused"
        )
    state: dict[str, Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                state |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise PayloadError(
                f"{path} could not be read: {error}", "the file is damaged", kind="refused"
            ) from error
    return state


def _check_tensors(shapes: Mapping[str, tuple[int, ...]], config: DrafterConfig, where: str) -> None:
    expected = tensor_shapes(config)
    complaints = []
    if missing := sorted(expected.keys() - shapes.keys()):
        complaints.append(f"lacks {_named(missing)}")
    if unexpected := sorted(shapes.keys() - expected.keys()):
        complaints.append(f"has unexpected {_named(unexpected)}")
    wrong = [
        f"{name} is {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if wrong:
        complaints.append(_named(wrong))
    if complaints:
        raise PayloadError(
            f"{where} does not fit its configuration: it {'; '.join(complaints)}",
            f"a DFlash drafter of {config.num_layers} layers has exactly {len(expected)} tensors",
            kind="refused",
        )


def _named(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _replace(source: Path, folder: Path) -> None:
    """Puts ``source`` in the place of ``folder``; a folder cannot be renamed over one that has files."""
    if not folder.exists():
        source.replace(folder)
        return
    old = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.old"
    folder.replace(old)
    source.replace(folder)
    shutil.rmtree(old)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
