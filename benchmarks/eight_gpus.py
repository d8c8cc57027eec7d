"""What eight GPUs would do, on paper, from figures of one and two: every split of the roles, and which is the best.

    python -m benchmarks.eight_gpus [--figures FILE] [--gpus N] [--json]

A micro-batch is 4 rows of 3,072 tokens. A step of D drafters consumes D of them, T targets produce them; the slower
side sets the pace, and what travels does so beside the work as long as the link is fast enough::

    rate = min(D / drafter_s, T / target_s, D * link / message)          micro-batches a second, roles apart
    rate = N / (target_s + drafter_s)                                    both roles on all N
    drafter_s = flop / drafter_flop_per_s + fixed_s + all_reduce_s       the first two from two measured shapes
    all_reduce_s = 2 (D - 1) / D * gradient_bytes / all_reduce_rate      not overlapped: one graph, one backward pass

The figures are in ``one_gpu.json`` beside this file, each with its source; another file replaces some or all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from payload.estimate import drafter_config, drafter_parameters
from payload.recipe import Recipe, load_recipe
from payload.target_shape import shape_of

FIGURES_FILE = Path(__file__).with_name("one_gpu.json")
PUBLISHED_SAMPLES_PER_S = 50.1
"""SpecForge on 8 H200, Qwen3-8B, samples of about 550 tokens: the best published."""

_ROWS, _LENGTH, _GRADIENT_BYTES = 4, 3072, 4


@dataclass(frozen=True)
class Figures:
    """Rates of one GPU and of the link between two. Milliseconds are of a drafter's step, forward to update."""

    target_tokens_per_s_550: float
    target_tokens_per_s_3072: float
    drafter_ms_4x3072x512: float
    drafter_ms_2x768x256: float
    link_bytes_per_s: float
    all_reduce_bytes_per_s: float


@dataclass(frozen=True)
class Scenario:
    """What a sample is, and how much is drafted from it: ``anchors`` of a row of 3,072 tokens."""

    name: str
    document: int
    anchors: int

    @property
    def samples(self) -> int:
        """Samples in a micro-batch."""
        return _ROWS * (_LENGTH // self.document)


SCENARIOS = (
    Scenario("550 tokens, 512 anchors a row of 3,072 (102 a sample)", 550, 512),
    Scenario("550 tokens, 512 anchors a sample, as SpecForge is set", 550, 5 * 512),
    Scenario("3,072 tokens, 512 anchors a sample", 3072, 512),
)


@dataclass(frozen=True)
class Split:
    """One way to give the roles to the GPUs, and what it would do. ``bound`` is what sets the pace."""

    targets: int
    drafters: int
    colocated: bool
    samples_per_s: float
    tokens_per_s: float
    step_ms: float
    bound: str
    target_busy: float
    drafter_busy: float
    link_share: float


def drafter_flop(recipe: Recipe, rows: int, length: int, anchors: int) -> float:
    """Matrix FLOP of a drafter's step of this shape, as `payload.trainer.metrics.drafter_step_flops` counts them."""
    config = drafter_config(recipe, shape_of(recipe.target.model))
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    blocks = rows * anchors
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * config.intermediate_size
    context = len(config.target_layer_ids) * hidden * hidden + config.num_layers * 2 * hidden * keys
    return (
        6.0 * config.num_layers * layer * blocks * config.block_size
        + 6.0 * context * rows * length
        + 4.0 * config.vocab_size * hidden * blocks * (config.block_size - 1)
    )


def splits(figures: Figures, scenario: Scenario, gpus: int, recipe: Recipe) -> list[Split]:
    """Every split of ``gpus``, all of them with both roles last."""
    apart = [_apart(figures, scenario, targets, gpus - targets, recipe) for targets in range(1, gpus)]
    return [*apart, _colocated(figures, scenario, gpus, recipe)]


def best(found: Sequence[Split]) -> Split:
    """The split with the most samples a second."""
    return max(found, key=lambda split: split.samples_per_s)


def message_bytes(recipe: Recipe) -> int:
    """What travels for a micro-batch: features in bf16, and tokens."""
    config = drafter_config(recipe, shape_of(recipe.target.model))
    return _ROWS * _LENGTH * (12 + len(config.target_layer_ids) * config.hidden_size * 2)


def _apart(figures: Figures, scenario: Scenario, targets: int, drafters: int, recipe: Recipe) -> Split:
    target_s, drafter_s = _seconds(figures, scenario, drafters, recipe)
    message = message_bytes(recipe)
    rates = {
        "drafters": drafters / drafter_s,
        "targets": targets / target_s,
        "link": min(targets, drafters) * figures.link_bytes_per_s / message,
    }
    bound = min(rates, key=lambda name: rates[name])
    rate = rates[bound]
    return Split(
        targets=targets,
        drafters=drafters,
        colocated=False,
        samples_per_s=rate * scenario.samples,
        tokens_per_s=rate * _ROWS * _LENGTH,
        step_ms=1000 * drafters / rate,
        bound=bound,
        target_busy=rate * target_s / targets,
        drafter_busy=rate * drafter_s / drafters,
        link_share=rate / rates["link"],
    )


def _colocated(figures: Figures, scenario: Scenario, gpus: int, recipe: Recipe) -> Split:
    target_s, drafter_s = _seconds(figures, scenario, gpus, recipe)
    step_s = target_s + drafter_s
    rate = gpus / step_s
    return Split(
        targets=gpus,
        drafters=gpus,
        colocated=True,
        samples_per_s=rate * scenario.samples,
        tokens_per_s=rate * _ROWS * _LENGTH,
        step_ms=1000 * step_s,
        bound="both",
        target_busy=target_s / step_s,
        drafter_busy=drafter_s / step_s,
        link_share=0.0,
    )


def _seconds(figures: Figures, scenario: Scenario, drafters: int, recipe: Recipe) -> tuple[float, float]:
    """Of a micro-batch: the target's time, and the drafter's with its share of the all-reduce."""
    of_target = (
        figures.target_tokens_per_s_3072 if scenario.document == _LENGTH else figures.target_tokens_per_s_550
    )
    large, small = drafter_flop(recipe, 4, 3072, 512), drafter_flop(recipe, 2, 768, 256)
    s_per_flop = (figures.drafter_ms_4x3072x512 - figures.drafter_ms_2x768x256) / 1000 / (large - small)
    fixed_s = figures.drafter_ms_2x768x256 / 1000 - small * s_per_flop
    step_s = drafter_flop(recipe, _ROWS, _LENGTH, scenario.anchors) * s_per_flop + fixed_s
    weights = drafter_parameters(drafter_config(recipe, shape_of(recipe.target.model)))
    reduced = 2 * (drafters - 1) / drafters * weights * _GRADIENT_BYTES / figures.all_reduce_bytes_per_s
    return _ROWS * _LENGTH / of_target, step_s + reduced


def read_figures(path: Path | None = None) -> tuple[Figures, dict[str, str]]:
    """The figures and their sources; those of ``path`` replace the shipped ones by name."""
    plain: dict[str, Mapping[str, Any]] = json.loads(FIGURES_FILE.read_text("utf-8"))
    if path is not None:
        plain |= json.loads(path.read_text("utf-8"))
    values = {name: float(one["value"]) for name, one in plain.items()}
    return Figures(**values), {name: str(one["source"]) for name, one in plain.items()}


def describe(figures: Figures, sources: Mapping[str, str], gpus: int, recipe: Recipe) -> str:
    """Figures and splits as Markdown."""
    lines = ["| figure | value | source |", "|---|---|---|"]
    lines += [f"| {name} | {value:,.4g} | {sources[name]} |" for name, value in asdict(figures).items()]
    for scenario in SCENARIOS:
        found = splits(figures, scenario, gpus, recipe)
        lines += ["", f"### {scenario.name}", ""]
        lines += [
            "| targets + drafters | samples/s | tokens/s | step | set by | targets busy | drafters busy | link |"
        ]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for split in found:
            name = f"{gpus} with both roles" if split.colocated else f"{split.targets} + {split.drafters}"
            mark = "**" if split is best(found) else ""
            lines.append(
                f"| {mark}{name}{mark} | {mark}{split.samples_per_s:.1f}{mark} | {split.tokens_per_s:,.0f} | "
                f"{split.step_ms:.0f} ms | {split.bound} | {split.target_busy:.0%} | {split.drafter_busy:.0%} | "
                f"{split.link_share:.1%} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--figures", type=Path, help="JSON of the same form as one_gpu.json")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    recipe = load_recipe("qwen3-8b")
    figures, sources = read_figures(given.figures)
    if not given.json:
        sys.stdout.write(describe(figures, sources, given.gpus, recipe) + "\n")
        return
    plain = {
        "figures": asdict(figures),
        "sources": sources,
        "message_bytes": message_bytes(recipe),
        "scenarios": {
            scenario.name: [asdict(split) for split in splits(figures, scenario, given.gpus, recipe)]
            for scenario in SCENARIOS
        },
    }
    sys.stdout.write(json.dumps(plain, indent=1) + "\n")


if __name__ == "__main__":
    main()
