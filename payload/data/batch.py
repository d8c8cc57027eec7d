"""What one micro-batch is."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class Batch:
    """B rows of S tokens; several documents may share a row.

    ``input_ids[B,S]`` int64; ``loss_mask[B,S]`` bool, true on supervised tokens; ``document_ids[B,S]`` int32, -1 on
    padding; ``position_ids[B,S]`` int64, counted from 0 inside each document.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    document_ids: torch.Tensor
    position_ids: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``. To a GPU it goes through pinned memory: from any other, the host waits until the GPU
        has done all that was queued before."""
        tensors = self.tensors()
        if device.type == "cuda":
            tensors = [tensor if tensor.is_cuda else tensor.pin_memory() for tensor in tensors]
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors))

    def tensors(self) -> list[torch.Tensor]:
        """The four tensors in the order of the fields."""
        return [getattr(self, field.name) for field in fields(self)]


def empty_batch(batch_size: int, length: int, device: torch.device | str = "cpu") -> Batch:
    """A batch of padding alone, of the shapes and types of a real one."""
    return Batch(
        input_ids=torch.zeros(batch_size, length, dtype=torch.int64, device=device),
        loss_mask=torch.zeros(batch_size, length, dtype=torch.bool, device=device),
        document_ids=torch.full((batch_size, length), -1, dtype=torch.int32, device=device),
        position_ids=torch.zeros(batch_size, length, dtype=torch.int64, device=device),
    )


def document_starts(document_ids: torch.Tensor) -> torch.Tensor:
    """The index at which each token's document begins in its row, int64 [B, S]."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return torch.where(begins, index, 0).cummax(dim=1).values


def positions_of(document_ids: torch.Tensor) -> torch.Tensor:
    """Positions [B,S] int64 counted from 0 at each change of document along a row; 0 on padding."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device)
    return torch.where(document_ids >= 0, index - document_starts(document_ids), 0)
