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


class Evaluator(Protocol):
    """What decodes held-out prompts with a drafter's state: a collective of the targets."""

    def evaluate(self, state: dict[str, torch.Tensor], compare_plain: bool) -> Acceptance | None: ...


def evaluate_everywhere(
    run: Run, side: Evaluator | None, program: DrafterProgram | None, compare_plain: bool
) -> Acceptance | None:
    """Bring the drafter's weights to the targets, decode there, and bring the result to everyone.

    Called by all ranks; returns the result on all of them, None when a stop cut it short.
    """
    state = program.full_state() if program is not None else {}
    lead = run.ranks.rank == run.roles.lead_drafter
    result = None
    if side is not None or lead:
        sent = {
            name: state[name].to(run.ranks.device, EXPORT_DTYPE).to(run.shape.dtype)
            if lead
            else torch.empty(shape, device=run.ranks.device, dtype=run.shape.dtype)
            for name, shape in tensor_shapes(run.config).items()
        }
        if run.groups.evaluation is not None:
            for tensor in sent.values():
                dist.broadcast(tensor, src=run.roles.lead_drafter, group=run.groups.evaluation)
        result = side.evaluate(sent, compare_plain) if side is not None else None
        result = _from(run.roles.lead_target, result, run.groups.evaluation)
    if program is not None:
        result = _from(run.roles.lead_drafter, result, run.groups.drafters)
    return result


def _from(rank: int, result: Acceptance | None, group: dist.ProcessGroup | None) -> Acceptance | None:
    """The result of ``rank``, on every member of ``group``."""
    if group is None:
        return result
    box = [result]
    dist.broadcast_object_list(box, src=rank, group=group, device=torch.device("cpu"))
    return box[0]
