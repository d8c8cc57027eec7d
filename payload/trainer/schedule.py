"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from payload.recipe import OptimSpec


def learning_rate(step: int, total_steps: int, optim: OptimSpec) -> float:
    """The rate of optimizer step ``step`` (1 .. total_steps).

    Linear warmup over ``warmup * total_steps`` steps, then: ``cosine`` falls to ``min_lr_ratio`` of the peak;
    ``wsd`` (warmup, stable, decay; MiniCPM, arXiv 2404.06395) stays at the peak and falls by a cosine over the last
    ``decay * total_steps`` steps; ``constant`` stays.
    """
    warmup_steps = round(optim.warmup * total_steps)
    if step <= warmup_steps:
        return optim.lr * step / warmup_steps
    decay_start = {
        "cosine": warmup_steps,
        "wsd": max(warmup_steps, total_steps - round(optim.decay * total_steps)),
        "constant": total_steps,
    }[optim.schedule]
    if step <= decay_start:
        return optim.lr
    progress = min(1.0, (step - decay_start) / (total_steps - decay_start))
    share = 0.5 * (1 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * share)
