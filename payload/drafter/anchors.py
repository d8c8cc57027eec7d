"""Which tokens start a block: a stratified sample of the supervised positions of each row.

Every supervised position is equally likely, and each document of a packed row gets its share of the anchors
by the length of its supervised text, to within two. A plain uniform subset has the same expectation but
leaves short documents without any anchor far more often. Shapes are static and nothing waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Anchors(NamedTuple):
    """``positions[B, A]`` int64, indices into the row, ascending; ``valid[B, A]`` bool, the valid ones first.

    An invalid anchor lies at the row's last index, so that positions ascend over all A, and takes part in
    nothing.
    """

    positions: Tensor
    valid: Tensor


def anchor_candidates(loss_mask: Tensor, document_ids: Tensor) -> Tensor:
    """Positions that may be anchors, bool [B, S]: they and the next token are supervised, in one document."""
    candidates = torch.zeros_like(loss_mask)
    candidates[:, :-1] = (
        loss_mask[:, :-1]
        & loss_mask[:, 1:]
        & (document_ids[:, :-1] == document_ids[:, 1:])
        & (document_ids[:, :-1] >= 0)
    )
    return candidates


def sample_anchors(
    loss_mask: Tensor, document_ids: Tensor, num_anchors: int, generator: torch.Generator
) -> Anchors:
    """Draws ``num_anchors`` distinct anchors a row, or all candidates where there are fewer.

    ``loss_mask[B, S]`` bool, ``document_ids[B, S]`` int (-1 is padding), ``generator`` on the same device.
    The M candidates of a row, rotated by a random offset, are cut into A runs of equal length to within one,
    and one is drawn from each run: that makes the sample uniform, distinct and spread.
    """
    batch, length = loss_mask.shape
    device = loss_mask.device
    rank = anchor_candidates(loss_mask, document_ids).cumsum(1)
    total = rank[:, -1:]
    drawn = total.clamp(max=num_anchors)
    runs = drawn.clamp(min=1)

    noise = torch.rand(batch, num_anchors + 1, generator=generator, device=device, dtype=torch.float64)
    index = torch.arange(num_anchors, device=device)
    start = index * total // runs
    size = (index + 1) * total // runs - start
    within = torch.minimum((noise[:, 1:] * size).long(), size - 1)
    rotation = (noise[:, :1] * total).long()
    choice = (rotation + start + within) % total.clamp(min=1)

    valid = index < drawn
    positions = torch.searchsorted(rank, choice + 1)
    positions = torch.where(valid, positions, length - 1).sort(dim=1).values
    return Anchors(positions, valid)
