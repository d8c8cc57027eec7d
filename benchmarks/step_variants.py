"""The step with single optimisations taken back, and the readable reference, so that one run shows what each is worth.

A variant is the set of levers that are off. Each is a patch of one function by its plain form; all forms compute the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from payload.drafter import fp8, loss, model, products
from payload.drafter.row_slope import RowSlope, narrowed, reference_row_slope
from payload.trainer import program


def _gate_and_up_at_once(mlp: model.MLP, x: Tensor) -> Tensor:
    both = products.linear(x, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    gate, up = both.chunk(2, dim=-1)
    return mlp.product(F.silu(gate) * up, mlp.down_proj.weight)


def _plain_row_slope(logits: Tensor, labels: Tensor, narrow: bool = False) -> RowSlope:
    found = reference_row_slope(logits, labels)
    return found._replace(slope=narrowed(found.slope)) if narrow else found


def _narrow_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return (grad.T @ x).to(dtype)


def _every_row(embeddings: model.BlockEmbeddings) -> Tensor:
    """One row for each slot, the mask's repeated. The number of slots is not known here: the block's is 16 or 8."""
    anchors = embeddings.anchors.flatten(0, 1)[:, None]
    masks = embeddings.mask.expand(len(anchors), _BLOCK_SIZE[0] - 1, -1)
    return torch.cat([anchors, masks], dim=1).flatten(0, 1)


def _as_they_are(embeddings: model.BlockEmbeddings, rows: Tensor, block_size: int) -> Tensor:
    return rows.view(embeddings.anchors.shape[0], -1, rows.shape[-1])


_BLOCK_SIZE = [16]
_layer_forward = model.Layer.forward


def _all_slots(
    layer: model.Layer,
    hidden: Any,
    context: Tensor,
    rotary: model.Rotary,
    mask: Any,
    block_size: int,
    drafted_only: bool,
) -> Tensor:
    out = _layer_forward(layer, hidden, context, rotary, mask, block_size, False)
    return model.drafted_slots(out, block_size) if drafted_only else out


def _patch(owner: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(owner, name, value)


LEVERS: dict[str, tuple[str, tuple[Callable[[], Any], ...]]] = {
    "two-gates": (
        "gate and up are two products, so that no kernel writes their gradients as halves of one matrix",
        (_patch(model.MLP, "trained", _gate_and_up_at_once),),
    ),
    "wide-gradients": (
        "gradients of weights are written in fp32 by their products",
        (
            _patch(products, "weight_gradient", _narrow_gradient),
            _patch(fp8, "weight_gradient", _narrow_gradient),
        ),
    ),
    "mask-once": (
        "the first layer projects the mask's row once",
        (
            _patch(model.BlockEmbeddings, "rows", _every_row),
            _patch(model.BlockEmbeddings, "spread", _as_they_are),
        ),
    ),
    "last-slots": (
        "slot 0 leaves the last layer after its attention",
        (_patch(model.Layer, "forward", _all_slots),),
    ),
    "row-slope": (
        "cross-entropy and slope in one kernel, in the logits' place",
        (_patch(loss, "row_slope", _plain_row_slope),),
    ),
    "keep-less": (
        "cheap operations are computed again in the backward pass",
        (_patch(program, "_keep_less", nullcontext),),
    ),
}
"""Lever -> what it does, and the patches that take it back."""

REFERENCE = (_patch(model.DFlashDrafter, "forward", model.reference_hidden),)


@contextmanager
def variant(name: str, off: tuple[str, ...] = (), block_size: int = 16) -> Iterator[None]:
    """Within it, the drafter is ``fast`` without the levers ``off``, or ``reference``: all off, written plainly."""
    chosen = tuple(LEVERS) if name == "reference" else off
    _BLOCK_SIZE[0] = block_size
    with ExitStack() as stack:
        for lever in chosen:
            for patch in LEVERS[lever][1]:
                stack.enter_context(patch())
        if name == "reference":
            for patch in REFERENCE:
                stack.enter_context(patch())
        yield
