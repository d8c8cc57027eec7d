"""Which options of flex_attention's kernels are fastest at a drafter's masks, and that they compute the same.

``python -m benchmarks.step_attention --shape large`` times forward and backward of one layer's attention for each
set of options, on random queries, keys and values. Forward and backward options are independent, so one run of each
pair measures both. With ``--flash`` FlashAttention's kernels run instead (torch's ``BACKEND: FLASH``; needs
flash-attn-4), beside torch's choice.
"""

from __future__ import annotations

import argparse
import json
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from triton.testing import do_bench

from benchmarks.step_shapes import SHAPES, build_supply, recipe_of
from payload.drafter.anchors import sample_anchors
from payload.drafter.masks import build_masks

FORWARD: list[dict[str, Any]] = [
    {},
    {"BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 2, "num_warps": 8},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 4, "num_warps": 8},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 2, "num_warps": 8},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 3, "num_warps": 8, "USE_TMA": True},
    {"BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 2, "num_warps": 8, "USE_TMA": True},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 3, "num_warps": 8, "PRESCALE_QK": True},
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 3, "num_warps": 4},
    {"BLOCK_M": 64, "BLOCK_N": 128, "num_stages": 2, "num_warps": 4},
    {"BLOCK_M": 128, "BLOCK_N": 32, "num_stages": 3, "num_warps": 8},
    {"BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 3, "num_warps": 8},
]
BACKWARD: list[dict[str, Any]] = [
    {
        "BLOCK_M1": m1,
        "BLOCK_N1": n1,
        "BLOCK_M2": m2,
        "BLOCK_N2": n2,
        "num_stages": stages,
        "num_warps": warps,
    }
    for m1, n1, m2, n2, stages, warps in (
        (64, 128, 128, 64, 3, 8),
        (64, 128, 128, 64, 2, 8),
        (64, 128, 128, 64, 1, 8),
        (64, 64, 64, 64, 3, 4),
        (64, 64, 64, 64, 2, 4),
        (32, 128, 128, 32, 3, 8),
        (32, 128, 128, 32, 3, 4),
        (128, 128, 128, 128, 2, 8),
        (32, 64, 64, 32, 3, 4),
        (64, 128, 128, 64, 4, 8),
        (64, 128, 128, 128, 2, 8),
    )
]


def measure(inputs: Any, options: Any, grad: Tensor) -> dict[str, Any]:
    """Milliseconds of forward and backward of ``inputs`` (query, key, value, mask), and what came ``out`` of both."""
    query, key, value, mask = inputs
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # the backward pass is run again and again
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def forward() -> Tensor:
        return compiled(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=options)

    out = forward()

    def backward() -> None:
        torch.autograd.grad(out, (query, key, value), grad, retain_graph=True)

    return {
        "forward_ms": do_bench(forward, warmup=50, rep=150, return_mode="median"),
        "backward_ms": do_bench(backward, warmup=50, rep=150, return_mode="median"),
        "out": (out.detach(), *torch.autograd.grad(out, (query, key, value), grad, retain_graph=True)),
    }


def differences(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> dict[str, float]:
    """Relative distances of the output and of the gradients of query, key and value."""
    return {
        name: float((one.float() - other.float()).norm() / other.float().norm())
        for name, one, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True)
    }


def main() -> None:
    """Entry of the command: a JSON line for each set of options."""
    parser = argparse.ArgumentParser(prog="benchmarks.step_attention", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="large")
    parser.add_argument("--first", type=int, default=0, help="skip this many sets of options")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument(
        "--flash", action="store_true", help="torch's choice, then FlashAttention's kernels alone"
    )
    chosen = parser.parse_args()
    shape, device = SHAPES[chosen.shape], torch.device("cuda")
    config = shape.drafter
    batch = build_supply(shape, recipe_of(shape), device).batch
    generator = torch.Generator(device).manual_seed(0)
    anchors = sample_anchors(batch.loss_mask, batch.document_ids, shape.anchors, generator)
    mask = build_masks(config, anchors, batch.document_ids, "flex")[config.layer_types[0]]
    slots = shape.anchors * config.block_size

    def heads(count: int, length: int) -> Tensor:
        size = (shape.rows, length, count, config.head_dim)
        made = torch.randn(size, device=device, dtype=shape.dtype, generator=generator)
        return made.transpose(1, 2).requires_grad_()

    inputs = (
        heads(config.num_attention_heads, slots),
        *(heads(config.num_key_value_heads, shape.context + slots) for _ in range(2)),
        mask,
    )
    grad = torch.randn(inputs[0].shape, device=device, dtype=shape.dtype, generator=generator)
    expected = None
    pairs = list(zip_longest(FORWARD, BACKWARD, fillvalue=FORWARD[0]))
    candidates: list[dict[str, Any]] = [
        {f"fwd_{name}": value for name, value in forward.items()}
        | {f"bwd_{name}": value for name, value in backward.items()}
        for forward, backward in pairs[chosen.first : chosen.first + chosen.count]
    ]
    if chosen.flash:
        candidates = [{}, {"BACKEND": "FLASH"}]
    for options in candidates:
        try:
            result = measure(inputs, options, grad)
        except Exception as error:  # noqa: BLE001 - options without a kernel are a result too
            print(json.dumps({**options, "error": str(error).strip()[:200]}), flush=True)  # noqa: T201
            continue
        out = result.pop("out")
        expected = out if expected is None else expected
        result["differences"] = differences(out, expected)
        print(json.dumps({**options, **result}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
