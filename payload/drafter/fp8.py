"""Matrix products in 8-bit floating point, twice as fast as in bf16 on the GPUs that have them.

Values are e4m3 (3 bits of mantissa), gradients e5m2 (2 bits, but the range that a softmax's slope needs), each tensor
with one fp32 scale (Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433). Gradients of weights are
products of the tensors as they were: their errors would add up in the weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from payload.drafter.products import weight_gradient
from payload.errors import PayloadError

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_ALIGNMENT = 16  # torch._scaled_mm: inner and outer sizes of a product must be multiples of it


class Scaled(NamedTuple):
    """A tensor as ``values`` (8 bits each) times ``scale`` (an fp32 scalar)."""

    values: Tensor
    scale: Tensor


class Fp8Head(NamedTuple):
    """A frozen head: ``weight[V, H]`` and the same values ``transposed[H, V]``, as either product reads them."""

    weight: Scaled
    transposed: Tensor


def scaled(x: Tensor, dtype: torch.dtype) -> Scaled:
    """``x`` with its greatest magnitude scaled to the greatest of ``dtype``."""
    limit = torch.finfo(dtype).max
    greatest = x.detach().abs().amax().float().clamp(min=1e-30)
    return Scaled((x.float() * (limit / greatest)).to(dtype), greatest / limit)


def product(a: Scaled, b: Scaled, dtype: torch.dtype, precise: bool) -> Tensor:
    """``a[M, K] @ b[N, K].T`` in ``dtype``; ``precise`` adds partial sums in fp32, which long sums need."""
    return torch._scaled_mm(
        a.values,
        b.values.T,
        scale_a=a.scale,
        scale_b=b.scale,
        out_dtype=dtype,
        use_fast_accum=not precise,
    )


def fp8_head(weight: Tensor) -> Fp8Head:
    """The head ``weight[V, H]`` in e4m3. Raises PayloadError (kind "refused") where its sizes do not fit."""
    require_sizes("head", *weight.shape)
    narrow = scaled(weight, VALUES)
    return Fp8Head(narrow, narrow.values.T.contiguous())


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`products.linear` with e4m3 operands, and e5m2 for the gradient that comes back."""
    out: Tensor = _Fp8Linear.apply(x.flatten(0, -2), weight)
    return out.unflatten(0, x.shape[:-1])


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        narrow = scaled(weight, VALUES)
        ctx.save_for_backward(x, *narrow)
        ctx.dtype = weight.dtype
        return product(scaled(x, VALUES), narrow, x.dtype, precise=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, values, scale = ctx.saved_tensors
        transposed = Scaled(values.T.contiguous(), scale)
        into_x = product(scaled(grad, GRADIENTS), transposed, x.dtype, precise=True)
        return into_x, weight_gradient(grad, x, ctx.dtype)


def require_sizes(part: str, *sizes: int) -> None:
    """Raises PayloadError (kind "refused") where matrices of a part of the step do not fit FP8 products."""
    if any(size % _ALIGNMENT for size in sizes):
        raise PayloadError(
            f"the {part}'s matrices {list(sizes)} cannot be computed in FP8: sizes must be multiples of {_ALIGNMENT}",
            f"Leave {part} out of train.fp8.",
            kind="refused",
        )


def require_fp8(device: torch.device) -> None:
    """Raises PayloadError (kind "refused") on a GPU without 8-bit matrix units."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise PayloadError(
            f"{torch.cuda.get_device_name(device)} has no FP8 matrix units",
            "Set train.fp8 to [], or use a GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell).",
            kind="refused",
        )
