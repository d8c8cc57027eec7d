"""Matrix products of the drafter's training.

They are computed in the dtype of the activations. The gradient of a weight is kept in the weight's own dtype: for fp32
masters under bf16 a GPU's products write it so, never rounded to bf16 and without a pass that widens it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Product = Callable[[Tensor, Tensor], Tensor]
"""``x[..., K]`` and ``weight[N, K]`` to ``x @ weight.T``: `linear`, or a form of it."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x[..., K]`` times ``weight[N, K]`` transposed: [..., N]."""
    out: Tensor = _Linear.apply(x.flatten(0, -2), weight)
    return out.unflatten(0, x.shape[:-1])


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient [N, K] of a weight, of its ``dtype``, from ``grad[R, N]`` and ``x[R, K]``."""
    if grad.is_cuda and dtype == torch.float32 and grad.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(grad.T, x, out_dtype=dtype)
    return (grad.T @ x).to(dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        narrow = weight.to(x.dtype)
        ctx.save_for_backward(x, narrow)
        ctx.dtype = weight.dtype
        return F.linear(x, narrow)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        x, narrow = ctx.saved_tensors
        into_x = grad @ narrow if ctx.needs_input_grad[0] else None
        return into_x, weight_gradient(grad, x, ctx.dtype)
