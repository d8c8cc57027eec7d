"""Features on their way from the rank that computed them to the rank that trains on them.

One message is three or four tensors: the tokens of the micro-batch and its features, and the target's final hidden
states when the loss needs them. Shapes are static, so buffers are made once. Sends and receives are posted ahead and
bounded in number: a target computes the next micro-batch while the last one travels.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from payload.data.batch import Batch, positions_of


class Supply(NamedTuple):
    """What a drafter needs for one micro-batch: ``features[B,S,n*H]``; ``teacher[B,S,H]`` or None."""

    batch: Batch
    features: torch.Tensor
    teacher: torch.Tensor | None


@dataclass(frozen=True)
class SupplyShape:
    """Sizes of a ``Supply``: B, S, n*H, H (0 without teacher) and the type of the features."""

    batch_size: int
    length: int
    features: int
    teacher: int
    dtype: torch.dtype

    def buffers(self, device: torch.device) -> list[torch.Tensor]:
        """Empty tensors of the shapes that travel, in their order."""
        rows = (self.batch_size, self.length)
        tensors = [
            torch.empty(3, *rows, dtype=torch.int32, device=device),
            torch.empty(*rows, self.features, dtype=self.dtype, device=device),
        ]
        if self.teacher:
            tensors.append(torch.empty(*rows, self.teacher, dtype=self.dtype, device=device))
        return tensors

    @property
    def message_bytes(self) -> int:
        """Bytes of one message."""
        tokens = self.batch_size * self.length
        return tokens * (12 + (self.features + self.teacher) * self.dtype.itemsize)


def pack(supply: Supply) -> list[torch.Tensor]:
    """The tensors that travel: tokens int32 [3,B,S] (ids, loss mask, documents), features and, maybe, teacher."""
    batch = supply.batch
    tokens = torch.stack(
        [batch.input_ids.to(torch.int32), batch.loss_mask.to(torch.int32), batch.document_ids]
    )
    tensors = [tokens, supply.features.contiguous()]
    if supply.teacher is not None:
        tensors.append(supply.teacher.contiguous())
    return tensors


def unpack(tensors: list[torch.Tensor]) -> Supply:
    """The inverse of ``pack``."""
    ids, loss_mask, document_ids = tensors[0]
    batch = Batch(ids.long(), loss_mask.bool(), document_ids, positions_of(document_ids))
    return Supply(batch, tensors[1], tensors[2] if len(tensors) > 2 else None)


class Outbox:
    """Sends in flight, at most ``capacity`` messages of them. ``waited_s`` is the time spent on a full outbox."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._in_flight: deque[tuple[list[Any], list[torch.Tensor]]] = deque()
        self.waited_s = 0.0

    def send(self, supply: Supply, consumer: int) -> None:
        """Post a message; waits for the oldest one first when the outbox is full."""
        while len(self._in_flight) >= self._capacity:
            self._finish_oldest()
        tensors = pack(supply)
        # The tensors are kept with their handles: they must not be freed while they travel.
        self._in_flight.append(([dist.isend(tensor, consumer) for tensor in tensors], tensors))

    def flush(self) -> None:
        """Wait until everything has been received."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        started = time.monotonic()
        handles, _ = self._in_flight.popleft()
        for handle in handles:
            handle.wait()
        self.waited_s += time.monotonic() - started


class Inbox:
    """Receives posted ahead, at most ``capacity`` messages of them, taken in the order in which they were expected."""

    def __init__(self, shape: SupplyShape, device: torch.device, capacity: int) -> None:
        self._shape = shape
        self._device = device
        self._capacity = capacity
        self._free: list[list[torch.Tensor]] = []
        self._expected: deque[tuple[list[Any], list[torch.Tensor]]] = deque()
        self._in_use: list[torch.Tensor] | None = None
        self.waited_s = 0.0

    @property
    def has_room(self) -> bool:
        """Whether another receive may be posted."""
        return len(self._expected) < self._capacity

    def expect(self, producer: int) -> None:
        """Post the receive of the next message of ``producer``."""
        buffers = self._free.pop() if self._free else self._shape.buffers(self._device)
        self._expected.append(([dist.irecv(buffer, producer) for buffer in buffers], buffers))

    def take(self) -> Supply:
        """Wait for the oldest expected message. It stays valid until the next call."""
        # On a GPU the next receive is ordered after the work already queued on the buffer that is given back.
        if self._in_use is not None:
            self._free.append(self._in_use)
        started = time.monotonic()
        handles, buffers = self._expected.popleft()
        for handle in handles:
            handle.wait()
        self.waited_s += time.monotonic() - started
        self._in_use = buffers
        return unpack(buffers)
