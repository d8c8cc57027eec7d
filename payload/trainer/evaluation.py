"""Held-out acceptance during training: the drafter's weights go to the targets, the result to the lead drafter."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from payload.decode import Acceptance
from payload.drafter.checkpoint import tensor_shapes
from payload.trainer.program import DrafterProgram
from payload.trainer.run import Run


class Evaluator(Protocol):
    """What decodes held-out prompts with a drafter's state: a collective of the targets."""

    def evaluate(self, state: dict[str, torch.Tensor], compare_plain: bool) -> Acceptance | None: ...


def evaluate_everywhere(
    run: Run, side: Evaluator | None, program: DrafterProgram | None, compare_plain: bool
) -> Acceptance | None:
    """Bring the drafter's weights to the targets, decode there, and bring the result to the lead drafter.

    Called by all ranks; returns the result on targets and on the lead drafter, None when a stop cut it short.
    """
    state = program.full_state() if program is not None else {}
    lead = run.ranks.rank == run.roles.lead_drafter
    if side is None and not lead:
        return None
    sent = {
        name: state[name].to(run.ranks.device, run.shape.dtype)
        if lead
        else torch.empty(shape, device=run.ranks.device, dtype=run.shape.dtype)
        for name, shape in tensor_shapes(run.config).items()
    }
    if run.groups.evaluation is not None:
        for tensor in sent.values():
            dist.broadcast(tensor, src=run.roles.lead_drafter, group=run.groups.evaluation)
    result = side.evaluate(sent, compare_plain) if side is not None else None
    if run.groups.evaluation is not None:
        box = [result]
        dist.broadcast_object_list(
            box, src=run.roles.lead_target, group=run.groups.evaluation, device=torch.device("cpu")
        )
        result = box[0]
    return result
