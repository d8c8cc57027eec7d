"""What each rank of a run did with its time and memory, in one file for all: ``ranks.json`` of the run's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from payload.trainer.run import Run
from payload.trainer.target_side import TargetSide

FILE = "ranks.json"


@dataclass(frozen=True)
class RankSummary:
    """``features_s``: mean device time of one micro-batch's features, the first left out; ``sending_wait_s``: time
    that a target's device waited for drafters to take what was sent. Both None on a rank that is no target.
    ``memory_bytes``: the most that was allocated on its GPU, 0 on a CPU."""

    rank: int
    target: bool
    drafter: bool
    features_s: float | None
    sending_wait_s: float | None
    memory_bytes: int


def write_summaries(run: Run, side: TargetSide | None) -> None:
    """Gather what every rank has to say and write it down on the lead drafter. A collective of all ranks."""
    rank, device = run.ranks.rank, run.ranks.device
    own = RankSummary(
        rank=rank,
        target=rank in run.roles.targets,
        drafter=rank in run.roles.drafters,
        features_s=side.features_time.later_mean_s if side is not None else None,
        sending_wait_s=side.outbox.waited_s if side is not None else None,
        memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    )
    everyone = [own]
    if run.ranks.world_size > 1:
        gathered: list[RankSummary | None] = [None] * run.ranks.world_size
        dist.all_gather_object(gathered, own)
        everyone = [summary for summary in gathered if summary is not None]
    if rank == run.roles.lead_drafter:
        plain = [asdict(summary) for summary in everyone]
        (run.run_dir / FILE).write_text(json.dumps(plain, indent=1), encoding="utf-8")
