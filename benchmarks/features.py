"""The target's features: tokens a second of `TargetProgram.produce`, against transformers' own forward pass.

    python -m benchmarks.features [--shape qwen3-8b|tiny] [--device cuda|cpu] [--repeats N] [--profile] [--json]

The baseline is the plain one: the model called with ``output_hidden_states`` and a boolean mask [B, 1, S, S] on the
same batch, without logits, its hidden states picked afterwards. Random weights in the target's real shapes; random
tokens. Three layouts: one row of 16,384 tokens packed with documents of about 550; a training batch of 4 rows of 3,072
packed alike; the same batch with one document a row. A ceiling, a sustained square matrix product, is measured in the
same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.made_up import Shape, write_target
from benchmarks.timing import Timing, device_name, longest_kernels, matmul_ceiling, peak_memory, timed
from payload.data.batch import Batch, positions_of
from payload.drafter.config import default_target_layer_ids
from payload.recipe import TargetSpec
from payload.target import Target
from payload.target_attention import document_mask
from payload.trainer.program import TargetProgram


@dataclass(frozen=True)
class Layout:
    """``rows`` rows of ``length`` tokens of documents of about ``document`` tokens, or of one document (None)."""

    name: str
    rows: int
    length: int
    document: int | None


LAYOUTS: dict[Shape, tuple[Layout, ...]] = {
    "qwen3-8b": (
        Layout("packed 1 x 16384", 1, 16384, 550),
        Layout("packed 4 x 3072", 4, 3072, 550),
        Layout("whole 4 x 3072", 4, 3072, None),
    ),
    "tiny": (Layout("packed 2 x 300", 2, 300, 40), Layout("whole 2 x 300", 2, 300, None)),
}
DRAFTER_LAYERS: dict[Shape, int] = {"qwen3-8b": 5, "tiny": 2}


@dataclass(frozen=True)
class Result:
    """One layout. ``error`` is the relative distance of our features from the baseline's; memory beyond weights."""

    layout: str
    tokens: int
    ms: Timing
    tokens_per_s: float
    tflops_per_s: float
    share_of_ceiling: float
    memory_bytes: int | None
    baseline_ms: Timing
    baseline_tokens_per_s: float
    baseline_memory_bytes: int | None
    speedup: float
    error: float
    longest_kernels_ms: dict[str, float]


def packed_batch(layout: Layout, vocabulary: int, device: torch.device, seed: int = 0) -> Batch:
    """Random tokens; document lengths from half to one and a half of the layout's, rows filled to the last token."""
    generator = torch.Generator().manual_seed(seed)
    documents = torch.zeros(layout.rows, layout.length, dtype=torch.int32)
    if layout.document is not None:
        for row in documents:
            start = number = 0
            while start < layout.length:
                size = layout.document // 2 + int(torch.randint(layout.document, (1,), generator=generator))
                row[start : start + size] = number
                start, number = start + size, number + 1
    ids = torch.randint(vocabulary, documents.shape, generator=generator)
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), documents, positions_of(documents))
    return batch.to(device)


def baseline_features(target: Target, batch: Batch, layer_ids: Sequence[int]) -> Tensor:
    """Features [B, S, n*H] by transformers' public interface alone."""
    states = target.model(
        input_ids=batch.input_ids,
        attention_mask=document_mask(batch.input_ids, batch.document_ids, None),
        position_ids=batch.position_ids,
        output_hidden_states=True,
        use_cache=False,
        logits_to_keep=1,
    ).hidden_states
    return torch.cat([states[layer + 1] for layer in layer_ids], dim=-1)


def useful_flops(config: Any, layer_ids: Sequence[int], document_ids: Tensor) -> float:
    """FLOP of the layers up to the deepest one wanted: 2 a weight and token, and 4 D a head and visible pair."""
    depth = max(layer_ids) + 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    weights = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    pairs = (positions_of(document_ids) + 1)[document_ids >= 0].sum().item()
    return depth * (2.0 * weights * document_ids.numel() + 4.0 * queries * pairs)


@torch.no_grad()
def measure(
    shape: Shape, device: torch.device, repeats: int, layouts: Sequence[Layout], profile: bool = False
) -> dict[str, Any]:
    """All layouts of a shape on a device, as plain data; with ``profile`` also the GPU's kernels of one run."""
    with tempfile.TemporaryDirectory(prefix="features-") as folder:
        spec = TargetSpec(str(write_target(Path(folder), shape)), random_weights=True)
        target = Target.load(spec, device, compiled=device.type == "cuda")
        # The same weights again: once asked for its hidden states, transformers' model can no longer be compiled.
        plain = Target.load(spec, device)
    layer_ids = default_target_layer_ids(target.config.num_hidden_layers, DRAFTER_LAYERS[shape])
    program = TargetProgram(target, layer_ids, with_teacher=False)
    ceiling = matmul_ceiling(device)
    results = [
        _measure_layout(program, plain, layout, device, repeats, ceiling, profile) for layout in layouts
    ]
    return {
        "torch": torch.__version__,
        "device": device_name(device),
        "shape": shape,
        "layers": list(layer_ids),
        "weights_bytes": sum(weight.nbytes for weight in target.model.parameters()),
        "ceiling_tflops_per_s": ceiling / 1e12,
        "ceiling_after_tflops_per_s": matmul_ceiling(device) / 1e12,
        "results": [asdict(result) for result in results],
    }


def _measure_layout(
    program: TargetProgram,
    plain_target: Target,
    layout: Layout,
    device: torch.device,
    repeats: int,
    ceiling: float,
    profile: bool,
) -> Result:
    target, layer_ids = program.target, program.layer_ids
    batch = packed_batch(layout, target.config.vocab_size, device)

    def ours() -> Tensor:
        return program.produce(batch).features

    def baseline() -> Tensor:
        return baseline_features(plain_target, batch, layer_ids)

    expected = baseline().float()
    error = float((ours().float() - expected).norm() / expected.norm())
    del expected
    fast, plain = (timed(work, device, repeats) for work in (ours, baseline))
    memory, plain_memory = (peak_memory(work, device) for work in (ours, baseline))
    tokens = batch.input_ids.numel()
    flops_per_s = useful_flops(target.config, layer_ids, batch.document_ids) / (fast.median_ms / 1000)
    return Result(
        layout=layout.name,
        tokens=tokens,
        ms=fast,
        tokens_per_s=1000 * tokens / fast.median_ms,
        tflops_per_s=flops_per_s / 1e12,
        share_of_ceiling=flops_per_s / ceiling,
        memory_bytes=memory,
        baseline_ms=plain,
        baseline_tokens_per_s=1000 * tokens / plain.median_ms,
        baseline_memory_bytes=plain_memory,
        speedup=plain.median_ms / fast.median_ms,
        error=error,
        longest_kernels_ms=longest_kernels(ours) if profile else {},
    )


def describe(found: dict[str, Any]) -> str:
    """The figures as lines for a person."""
    lines = [
        f"features of layers {found['layers']}, {found['shape']} shapes, torch {found['torch']} on {found['device']}",
        f"  weights {found['weights_bytes'] / 2**30:.1f} GiB; matrix products reach "
        f"{found['ceiling_tflops_per_s']:.2f} TFLOP/s, {found['ceiling_after_tflops_per_s']:.2f} at the end",
    ]
    for one in found["results"]:
        memory = "" if one["memory_bytes"] is None else f", {one['memory_bytes'] / 2**30:.2f} GiB"
        against = "" if one["memory_bytes"] is None else f", {one['baseline_memory_bytes'] / 2**30:.2f} GiB"
        lines.append(
            f"  {one['layout']:18} {one['ms']['median_ms']:8.1f} ms ({one['ms']['fastest_ms']:.1f} to "
            f"{one['ms']['slowest_ms']:.1f})  {one['tokens_per_s'] / 1e3:7.1f} Ktok/s  "
            f"{one['tflops_per_s']:6.1f} TFLOP/s, {one['share_of_ceiling']:.0%} of the ceiling{memory}\n"
            f"  {'transformers':>18} {one['baseline_ms']['median_ms']:8.1f} ms  "
            f"{one['baseline_tokens_per_s'] / 1e3:7.1f} Ktok/s{against}; ours is {one['speedup']:.2f} x as fast, "
            f"relative difference {one['error']:.1e}"
        )
        lines += [f"      {ms:8.2f} ms  {name}" for name, ms in one["longest_kernels_ms"].items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=list(LAYOUTS), help="qwen3-8b on a GPU, else tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU when there is one")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--profile", action="store_true", help="the GPU's longest kernels as well")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    shape: Shape = given.shape or ("qwen3-8b" if device.type == "cuda" else "tiny")
    found = measure(shape, device, given.repeats, LAYOUTS[shape], given.profile)
    sys.stdout.write((json.dumps(found, indent=1) if given.json else describe(found)) + "\n")


if __name__ == "__main__":
    main()
