"""The Triton kernel of `row_slope`; imported only where Triton is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from payload.drafter.row_slope import NARROW_SCALE

# Columns that a program handles at a time, and its warps: found best on an H200 for rows of 151,936 bf16 logits.
BLOCK = 8192
WARPS = 16


def row_slope_kernel(logits: Tensor, labels: Tensor, narrow: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(cross_entropy[R] fp32, predicted[R] int64, slope[R, V]) of ``logits[R, V]``.

    The slope takes the logits' place, or with ``narrow`` is a tensor of its own, as `row_slope.narrowed` has it.
    """
    rows, columns = logits.shape
    assert logits.stride(1) == 1
    cross_entropy = torch.empty(rows, device=logits.device, dtype=torch.float32)
    predicted = torch.empty(rows, device=logits.device, dtype=torch.int64)
    slope = torch.empty(logits.shape, device=logits.device, dtype=torch.float8_e5m2) if narrow else logits
    if rows:
        _row_slope[(rows,)](
            logits,
            labels,
            slope,
            cross_entropy,
            predicted,
            logits.stride(0),
            slope.stride(0),
            columns,
            UNIT=1.0 / NARROW_SCALE if narrow else 1.0,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return cross_entropy, predicted, slope


@triton.jit
def _row_slope(  # type: ignore[no-untyped-def]
    logits,
    labels,
    slopes,
    cross_entropy,
    predicted,
    stride,
    slopes_stride,
    columns,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    into = slopes + row * slopes_stride
    label = tl.load(labels + row)
    at_label = tl.load(base + label).to(tl.float32)
    lanes = tl.arange(0, BLOCK)

    # Each lane keeps the greatest logit that it saw, where it was, and its sum of exponentials relative to it.
    greatest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + lanes
        x = tl.load(base + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        above = x > greatest
        # Two infinities differ by no number: a lane that has seen nothing yet adds nothing.
        change = tl.where(x == greatest, 0.0, -tl.abs(x - greatest))
        scale = tl.exp2(change * LOG2_E)
        seen = tl.where(x == float("-inf"), 0.0, scale)
        total = tl.where(above, total * scale + 1.0, total + seen)
        where = tl.where(above, column, where)
        greatest = tl.maximum(greatest, x)

    peak = tl.max(greatest, 0)
    norm = tl.log2(tl.sum(total * tl.exp2((greatest - peak) * LOG2_E), 0)) + peak * LOG2_E
    tl.store(cross_entropy + row, norm / LOG2_E - at_label)
    tl.store(predicted + row, tl.min(tl.where(greatest == peak, where, columns), 0).to(tl.int64))

    # Backwards, since the end of the row was read last and is likeliest still in the cache.
    chunks = tl.cdiv(columns, BLOCK)
    for chunk in range(0, chunks):
        column = (chunks - 1 - chunk) * BLOCK + lanes
        x = tl.load(base + column, mask=column < columns, other=0.0).to(tl.float32)
        slope = tl.exp2(x * LOG2_E - norm) - tl.where(column == label, 1.0, 0.0)
        tl.store(into + column, (slope * UNIT).to(slopes.dtype.element_ty), mask=column < columns)
