"""Ways to compute the target's attention over packed documents, on a GPU: what the features are built on, and others.

    python -m benchmarks.target_attention [--json]

Qwen3-8B's heads, bf16, one row of 16,384 tokens of documents of about 550, of about 3,072, and of one. ``flex`` is what
`payload.target_attention` runs; ``flex {...}`` the same with other kernel options; ``varlen`` is torch's
``varlen_attn``, which needs the documents' bounds on the host's side of a wait; ``causal`` ignores documents.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.features import Layout, packed_batch
from benchmarks.timing import device_name, timed
from payload.target_attention import document_block_mask

_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_LAYOUTS = (
    Layout("documents of 550", 1, 16384, 550),
    Layout("documents of 3072", 1, 16384, 3072),
    Layout("one document", 1, 16384, None),
)
_OPTIONS: tuple[dict[str, int], ...] = (
    {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
)


@dataclass(frozen=True)
class Result:
    """``tflops_per_s`` counts visible pairs alone; ``distance`` is from ``flex``, relative; None: not the same task."""

    layout: str
    way: str
    ms: float | None
    tflops_per_s: float | None
    distance: float | None
    error: str | None = None


@torch.no_grad()
def measure(device: torch.device, repeats: int) -> list[Result]:
    """Every way on every layout."""
    # Each set of options is a compilation of the same function.
    torch._dynamo.config.recompile_limit = 64
    found = []
    for layout in _LAYOUTS:
        batch = packed_batch(layout, 1000, device)
        flop = 4.0 * _HEADS * _HEAD_DIM * float((batch.position_ids + 1).sum())
        reference: Tensor | None = None
        for name, way in _ways(batch.document_ids, batch.position_ids).items():
            try:
                output = way()
                ms = timed(way, device, repeats).median_ms
            except Exception as error:  # noqa: BLE001 - another way's failure is a finding, and the others go on
                first = next(iter(str(error).splitlines()), "")
                found.append(
                    Result(layout.name, name, None, None, None, f"{type(error).__name__}: {first[:120]}")
                )
                continue
            reference = output if reference is None else reference
            distance = float((output - reference).float().norm() / reference.float().norm())
            same = name != "causal" or layout.document is None
            found.append(Result(layout.name, name, ms, flop / ms / 1e9, distance if same else None))
    return found


def _ways(document_ids: Tensor, position_ids: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Each gives [1, heads, S, D]; the first is the product's."""
    length, device = document_ids.shape[1], document_ids.device
    generator = torch.Generator(device=device).manual_seed(0)

    def heads(count: int) -> Tensor:
        made = torch.randn(1, length, count, _HEAD_DIM, device=device, generator=generator)
        return made.bfloat16().transpose(1, 2)

    query, key, value = heads(_HEADS), heads(_KV_HEADS), heads(_KV_HEADS)
    mask = document_block_mask(document_ids, None)
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def flex(options: dict[str, int]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            out: Tensor = compiled(
                query, key, value, block_mask=mask, enable_gqa=True, kernel_options=options
            )
            return out

        return run

    def causal() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return {
        "flex": flex({}),
        **{f"flex {options}": flex(options) for options in _OPTIONS},
        "varlen": _varlen(query, key, value, position_ids),
        "causal": causal,
    }


def _varlen(query: Tensor, key: Tensor, value: Tensor, position_ids: Tensor) -> Callable[[], Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    length = query.shape[2]
    starts = (position_ids[0] == 0).nonzero()[:, 0].int()
    bounds = torch.cat([starts, starts.new_tensor([length])])
    longest = int((bounds[1:] - bounds[:-1]).max())
    queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
    options: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True}

    def run() -> Tensor:
        out: Any = varlen_attn(queries, keys, values, bounds, bounds, longest, longest, **options)
        flat: Tensor = out
        return flat.transpose(0, 1)[None]

    return run


def describe(found: Sequence[Result], device: torch.device) -> str:
    """The figures as lines for a person."""
    lines = [
        f"attention of the target, one row of 16,384 tokens, torch {torch.__version__} on {device_name(device)}"
    ]
    for one in found:
        if one.ms is None:
            lines.append(f"  {one.layout:18} {one.way:75} {one.error}")
            continue
        distance = "" if one.distance is None else f"  difference {one.distance:.1e}"
        lines.append(
            f"  {one.layout:18} {one.way:75} {one.ms:8.3f} ms  {one.tflops_per_s:6.1f} TFLOP/s{distance}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    device = torch.device("cuda")
    found = measure(device, given.repeats)
    plain = json.dumps([asdict(one) for one in found], indent=1)
    sys.stdout.write((plain if given.json else describe(found, device)) + "\n")


if __name__ == "__main__":
    main()
