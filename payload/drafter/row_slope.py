"""Losses of rows of logits together with their slopes: all that training through a frozen head needs of them.

The slope of a row's cross-entropy in its logits is softmax - onehot(label). On a GPU one kernel reads the logits,
computes cross-entropy and likeliest token, reads them again, mostly from the L2 cache, and writes the slope in their
place: torch's own operations take about a dozen passes through memory, in fp32, for the same.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

NARROW_SCALE = 2.0**-15
"""The unit of a slope in e5m2: its values lie in [-1, 1], and the smallest kept is 2^-31."""


class RowSlope(NamedTuple):
    """``loss[R]``, at least fp32; ``predicted[R]`` int64, the first of the likeliest tokens; ``slope[R, V]``, the
    loss's gradient, of the logits' dtype, or in units of `NARROW_SCALE` in e5m2."""

    loss: Tensor
    predicted: Tensor
    slope: Tensor


def row_slope(logits: Tensor, labels: Tensor, narrow: bool = False) -> RowSlope:
    """Cross-entropy of ``logits[R, V]``, which may be overwritten, with ``labels[R]`` int64; ``narrow``: slope in
    e5m2."""
    if logits.is_cuda and logits.dtype in (torch.bfloat16, torch.float16, torch.float32) and _has_triton():
        from payload.drafter.row_slope_kernel import row_slope_kernel

        return RowSlope(*row_slope_kernel(logits, labels, narrow))
    found = reference_row_slope(logits, labels)
    return found._replace(slope=narrowed(found.slope)) if narrow else found


def reference_row_slope(logits: Tensor, labels: Tensor) -> RowSlope:
    """`row_slope` in torch's own operations; leaves ``logits`` as they are."""
    scores = wide(logits)
    log_norm = scores.logsumexp(-1, keepdim=True)
    cross_entropy = log_norm - scores.gather(-1, labels[:, None])
    slope = torch.exp(scores - log_norm).scatter_add(-1, labels[:, None], -torch.ones_like(cross_entropy))
    return RowSlope(cross_entropy[:, 0], logits.argmax(-1), slope.to(logits.dtype))


def divergence_slope(logits: Tensor, target_logits: Tensor) -> RowSlope:
    """KL(target || drafter) of the distributions of two ``[R, V]`` of logits, in torch's own operations."""
    log_probs, target = wide(logits).log_softmax(-1), wide(target_logits).log_softmax(-1)
    aim = target.exp()
    slope = (log_probs.exp() - aim).to(logits.dtype)
    return RowSlope((aim * (target - log_probs)).sum(-1), logits.argmax(-1), slope)


def narrowed(slope: Tensor) -> Tensor:
    """A slope in e5m2, in units of `NARROW_SCALE`."""
    return (slope / NARROW_SCALE).to(torch.float8_e5m2)


def wide(x: Tensor) -> Tensor:
    """The same numbers in fp32, or in a wider type where they are of one."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
