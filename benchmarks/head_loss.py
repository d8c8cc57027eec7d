"""The frozen head and its weighted cross-entropy, forward and backward: the trainer's own way and libraries'.

    python -m benchmarks.head_loss [--json]

Qwen3-8B's head (hidden size 4,096, vocabulary 151,936), 30,720 rows (2,048 blocks of 15 drafted slots), bf16. Every way
gets random hidden states, labels and row weights, and brings a gradient to the hidden states alone. Libraries that are
not installed are left out: ``pip install liger-kernel cut-cross-entropy``. ``liger, unweighted`` and the row ``torch
compiled`` show what weights of rows, and logits that are kept, cost.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import device_name, matmul_ceiling, peak_memory, timed
from payload.drafter.loss import LossConfig, draft_loss

_GAMMA = 7.0

Way = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``hidden[G, L, H]``, ``head[V, H]``, ``labels[G, L]`` and ``weights[G, L]`` to the weighted sum of losses."""


@dataclass(frozen=True)
class Sizes:
    """G blocks of L drafted slots, hidden size H, vocabulary V."""

    blocks: int
    slots: int
    hidden: int
    vocabulary: int


QWEN3_8B = Sizes(blocks=2048, slots=15, hidden=4096, vocabulary=151936)
TINY = Sizes(blocks=8, slots=3, hidden=32, vocabulary=100)


@dataclass(frozen=True)
class Result:
    """``share`` is of the matrix ceiling, by the two products that are needed at least, the logits and the gradient.
    ``distance`` is the gradient's from an fp32 one, relative."""

    way: str
    ms: float | None
    share: float | None
    peak_gib: float | None
    distance: float | None
    error: str | None = None


def ours(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """What training runs: `draft_loss`, whose weights are those of the recipe's loss."""
    counted = torch.ones_like(labels, dtype=torch.bool)
    return draft_loss(hidden, head, labels, counted, LossConfig(gamma=_GAMMA)).loss_sum


def plain(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """All logits at once."""
    losses = F.cross_entropy((hidden.flatten(0, 1) @ head.T).float(), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum()


def liger(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """liger-kernel's fused linear cross-entropy, a loss for each row."""
    from liger_kernel.transformers import functional  # type: ignore[import-not-found]

    losses: Any = functional.liger_fused_linear_cross_entropy(
        hidden.flatten(0, 1), head, labels.flatten(), reduction="none"
    )
    return (losses * weights.flatten()).sum()


def liger_unweighted(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The same, summed by the kernel, so without weights."""
    from liger_kernel.transformers import functional

    loss: Tensor = functional.liger_fused_linear_cross_entropy(
        hidden.flatten(0, 1), head, labels.flatten(), reduction="sum"
    )
    return loss


def cut_cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Apple's cut cross-entropy, which never writes logits, with its filter of small gradients."""
    from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

    losses: Tensor = linear_cross_entropy(hidden.flatten(0, 1), head, labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum()


def ways(device: torch.device) -> dict[str, Way]:
    """Those that can run here, ours first."""
    compiled: Any = torch.compile(plain, fullgraph=True, dynamic=False)
    found: dict[str, Way] = {"ours": ours, "torch compiled": compiled, "torch": plain}
    if device.type == "cuda":
        if importlib.util.find_spec("liger_kernel"):
            found |= {"liger": liger, "liger, unweighted": liger_unweighted}
        if importlib.util.find_spec("cut_cross_entropy"):
            found["cut cross-entropy"] = cut_cross_entropy
    return found


def measure(device: torch.device, sizes: Sizes, repeats: int) -> list[Result]:
    """Every way, each with its gradient."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (sizes.blocks, sizes.slots)
    hidden = torch.randn(*shape, sizes.hidden, device=device, generator=generator).to(dtype).requires_grad_()
    head = 0.02 * torch.randn(sizes.vocabulary, sizes.hidden, device=device, generator=generator)
    head = head.to(dtype)
    labels = torch.randint(0, sizes.vocabulary, shape, device=device, generator=generator)
    decay = torch.exp(-torch.arange(sizes.slots, device=device) / _GAMMA)
    weights = decay.expand(shape).contiguous()
    ceiling = matmul_ceiling(device)
    flop = 2 * 2 * labels.numel() * sizes.hidden * sizes.vocabulary
    few = slice(0, max(1, sizes.blocks // 64))
    found = []
    for name, way in ways(device).items():

        def step(way: Way = way) -> None:
            hidden.grad = None
            way(hidden, head, labels, weights).backward()

        try:
            step()
            assert hidden.grad is not None
            unweighted = torch.ones_like(weights) if "unweighted" in name else weights
            exact = _exact_gradient(hidden[few], head, labels[few], unweighted[few])
            distance = float((hidden.grad[few].float() - exact).norm() / exact.norm())
            peak = peak_memory(step, device)
            ms = timed(step, device, repeats).median_ms
        except Exception as error:  # noqa: BLE001 - a library that does not run here is a row of the table
            found.append(Result(name, None, None, None, None, f"{type(error).__name__}: {error}"[:300]))
            continue
        gib = None if peak is None else peak / 2**30
        found.append(Result(name, ms, flop / (ms / 1000) / ceiling, gib, distance))
    return found


def _exact_gradient(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    wide = hidden.detach().float().requires_grad_()
    plain(wide, head.float(), labels, weights).backward()
    assert wide.grad is not None
    return wide.grad


def describe(results: Sequence[Result]) -> str:
    """A line a way, each beside ours."""
    baseline = next(result.ms for result in results if result.way == "ours")
    lines = []
    for result in results:
        if result.ms is None or baseline is None:
            lines.append(f"  {result.way:18} {result.error}")
            continue
        memory = "" if result.peak_gib is None else f", {result.peak_gib:.1f} GiB"
        lines.append(
            f"  {result.way:18} {result.ms:8.2f} ms, {result.ms / baseline:.2f} x ours, {result.share or 0:.1%} of the "
            f"matrix ceiling{memory}, gradient {result.distance or 0:.1e} from fp32's"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = measure(device, QWEN3_8B if device.type == "cuda" else TINY, given.repeats)
    if given.json:
        sys.stdout.write(json.dumps([asdict(result) for result in results], indent=1) + "\n")
        return
    sys.stdout.write(
        f"head and loss, torch {torch.__version__} on {device_name(device)}\n{describe(results)}\n"
    )


if __name__ == "__main__":
    main()
