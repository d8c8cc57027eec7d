"""What a run measures: lines of JSON for machines, TensorBoard events, and lines of text for a person."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from payload.drafter.config import DrafterConfig
from payload.drafter.loss import simulated_accepted_length
from payload.recipe import Recipe

# Dense bf16 matrix FLOP/s of one device, from the vendor's data sheets.
PEAK_FLOPS = {"H200": 989.5e12, "H100": 989.5e12, "A100": 312e12, "L40S": 362e12, "RTX A6000": 154.8e12}


@dataclass(frozen=True)
class Totals:
    """Sums over micro-batches and drafters, as ``DrafterProgram.accumulate`` lays them out."""

    loss_sum: float
    weight_sum: float
    skipped: int
    micro_batches: int
    correct: tuple[float, ...]
    counted: tuple[float, ...]
    accepted: tuple[float, ...]

    @classmethod
    def of(cls, sums: torch.Tensor, block_size: int) -> Totals:
        """Read the sums, float64 [4 + 3K]; waits for the device."""
        values = sums.tolist()
        rest = values[4:]
        return cls(
            loss_sum=values[0],
            weight_sum=values[1],
            skipped=round(values[2]),
            micro_batches=round(values[3]),
            correct=tuple(rest[:block_size]),
            counted=tuple(rest[block_size : 2 * block_size]),
            accepted=tuple(rest[2 * block_size : 3 * block_size]),
        )

    @property
    def loss(self) -> float:
        """The weighted mean; not a number when nothing counted."""
        return self.loss_sum / self.weight_sum if self.weight_sum else math.nan

    @property
    def accuracy(self) -> float:
        """Share of right slots among all that count."""
        return sum(self.correct) / max(1.0, sum(self.counted))

    @property
    def accuracy_by_position(self) -> list[float]:
        """The same for slots 1 .. K-1."""
        return [right / max(1.0, of) for right, of in zip(self.correct[1:], self.counted[1:], strict=True)]

    @property
    def simulated_accepted_length(self) -> float:
        """What greedy decoding would gain on the training text, per target forward."""
        accepted, counted = torch.tensor(self.accepted), torch.tensor(self.counted)
        return float(simulated_accepted_length(accepted, counted))


def drafter_step_flops(recipe: Recipe, config: DrafterConfig) -> float:
    """Matrix FLOP of one micro-batch on one drafter, forward and backward, attention scores not counted.

    6 FLOP a weight and token for the trained matrices (layers over draft tokens; fc, k_proj and v_proj over context
    tokens), 4 for the head, which is frozen and has no weight gradient; slot 0 of a block does not reach it.
    """
    hidden, size = config.hidden_size, config.block_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    blocks = recipe.train.batch_size * recipe.train.num_anchors
    context = recipe.train.batch_size * recipe.data.max_length
    per_layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * config.intermediate_size
    on_context = len(config.target_layer_ids) * hidden * hidden + config.num_layers * 2 * hidden * keys
    return (
        6.0 * config.num_layers * per_layer * blocks * size
        + 6.0 * on_context * context
        + 4.0 * config.vocab_size * hidden * blocks * (size - 1)
    )


def peak_flops(device: torch.device) -> float | None:
    """The device's peak, where it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


class MetricsLog:
    """Appends to ``metrics.jsonl`` and to TensorBoard's events in ``tensorboard/`` of a run's folder.

    A run that is resumed at ``first_step`` takes back what TensorBoard shows of that step and later ones.
    """

    def __init__(self, run_dir: Path, first_step: int = 1) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        purged = first_step if first_step > 1 else None
        self._board: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purged)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._board.close()

    def write(self, event: str, step: int, **values: Any) -> None:
        """One line ``{"event", "step", "time", ...}``; numbers, and lists of them by position, go to TensorBoard.

        JSON has no number that is not finite: null stands for it.
        """
        values = {name: _finite(value) for name, value in values.items()}
        line = {"event": event, "step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        for name, value in values.items():
            if isinstance(value, bool | str) or value is None:
                continue
            if isinstance(value, list | tuple):
                for position, item in enumerate(value, start=1):
                    self._board.add_scalar(f"{event}/{name}/{position}", item, step)
            elif isinstance(value, int | float):
                self._board.add_scalar(f"{event}/{name}", value, step)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
