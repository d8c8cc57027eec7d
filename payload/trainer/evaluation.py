"""Held-out acceptance during training: the drafter's weights go to the targets, the result to all ranks.

What is measured is the drafter as it is exported: its fp32 masters rounded to the export's type, whatever the target's.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from payload.acceptance import Acceptance
from payload.drafter.checkpoint import EXPORT_DTYPE, tensor_shapes
from payload.trainer.program import DrafterProgram
from payload.trainer.run import Run
from payload.trainer.shards import whole_tensor


class Evaluator(Protocol):
    """What decodes held-out prompts with a drafter's state: a collective of the targets."""

    def evaluate(self, state: dict[str, torch.Tensor], compare_plain: bool) -> Acceptance | None: ...


def evaluate_everywhere(
    run: Run, side: Evaluator | None, program: DrafterProgram | None, compare_plain: bool
) -> Acceptance | None:
    """Bring the drafter's weights to the targets, decode there, and bring the result to everyone.

    Called by all ranks; returns the result on all of them, None when a stop cut it short.
    """
    lead = run.ranks.rank == run.roles.lead_drafter
    result = None
    weights = _brought_to_targets(run, program)
    if side is not None:
        result = side.evaluate(weights, compare_plain)
    if side is not None or lead:
        result = _from(run.roles.lead_target, result, run.groups.evaluation)
    if program is not None:
        result = _from(run.roles.lead_drafter, result, run.groups.drafters)
    return result


def _brought_to_targets(run: Run, program: DrafterProgram | None) -> dict[str, torch.Tensor]:
    """The drafter's weights as they are exported, in the target's type, on every target; empty elsewhere.

    One after the other, so that no drafter ever holds more than one whole tensor of what it has a part of.
    """
    rank, device = run.ranks.rank, run.ranks.device
    lead, is_target = rank == run.roles.lead_drafter, rank in run.roles.targets
    state = program.drafter.state_dict() if program is not None else {}
    brought = {}
    for name, shape in tensor_shapes(run.config).items():
        # All drafters take part in gathering, though the lead alone has use for it.
        exported = whole_tensor(state[name]).to(device, EXPORT_DTYPE).to(run.shape.dtype) if state else None
        if not (is_target or lead):
            continue
        if not lead or exported is None:
            exported = torch.empty(shape, device=device, dtype=run.shape.dtype)
        if run.groups.evaluation is not None:
            dist.broadcast(exported, src=run.roles.lead_drafter, group=run.groups.evaluation)
        if is_target:
            brought[name] = exported
    return brought


def _from(rank: int, result: Acceptance | None, group: dist.ProcessGroup | None) -> Acceptance | None:
    """The result of ``rank``, on every member of ``group``."""
    if group is None:
        return result
    box = [result]
    dist.broadcast_object_list(box, src=rank, group=group, device=torch.device("cpu"))
    return box[0]
