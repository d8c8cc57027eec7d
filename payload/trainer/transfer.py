"""Features on their way from the rank that computed them to the rank that trains on them.

One message is three or four tensors: the tokens of the micro-batch and its features, and the target's final hidden
states when the loss needs them. Shapes are static, so buffers are made once. Sends and receives are posted ahead and
bounded in number: a target computes the next micro-batch while the last one travels.

Between GPUs NCCL does as a queue does: what one pair of ranks posted on one communicator runs in the order of posting,
and a receive that is posted holds a few multiprocessors until its message comes. So each direction between two ranks
has a communicator of its own (`Links`); all of them are opened before the first step, in one order; and a wait
holds up the GPU's stream, not the host, and is measured there (`Stopwatch`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from payload.data.batch import Batch, positions_of
from payload.trainer.stopwatch import Stopwatch


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


class Links:
    """The communicators over which supplies travel: for each pair of ranks one in either direction.

    To be made by all ranks at one place. ``pairs`` are the (producer, consumer) of the whole run (`Roles.links`).
    """

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.pairs = sorted(pairs)
        both_ways = any((consumer, producer) in pairs for producer, consumer in pairs)
        self._upward: dist.ProcessGroup | None = dist.new_group() if both_ways else None

    def group(self, producer: int, consumer: int) -> dist.ProcessGroup | None:
        """The group of a link; None is the job's own."""
        return self._upward if producer > consumer else None

    def open(self, rank: int, device: torch.device) -> None:
        """Send one number over each link of this rank.

        NCCL opens a communicator when it is first used, and holds up both ends until both are there. All ranks open
        theirs in one order here, so that none waits for another in the middle of a step.
        """
        for producer, consumer in self.pairs:
            number = torch.zeros(1, device=device)
            if rank == producer:
                dist.send(number, consumer, group=self.group(producer, consumer))
            elif rank == consumer:
                dist.recv(number, producer, group=self.group(producer, consumer))


class Outbox:
    """Sends in flight from rank ``rank``, at most ``capacity`` messages of them."""

    def __init__(self, rank: int, links: Links, device: torch.device, capacity: int) -> None:
        self._rank = rank
        self._links = links
        self._capacity = capacity
        self._in_flight: deque[tuple[list[Any], list[torch.Tensor]]] = deque()
        self._waits = Stopwatch(device)

    @property
    def waited_s(self) -> float:
        """Time spent on a full outbox."""
        return self._waits.seconds

    def send(self, supply: Supply, consumer: int) -> None:
        """Post a message; waits for the oldest one first when the outbox is full."""
        while len(self._in_flight) >= self._capacity:
            self._finish_oldest()
        tensors, group = pack(supply), self._links.group(self._rank, consumer)
        # The tensors are kept with their handles: they must not be freed while they travel.
        handles = [dist.isend(tensor, consumer, group=group) for tensor in tensors]
        self._in_flight.append((handles, tensors))

    def flush(self) -> None:
        """Wait until everything has been received."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        handles, _ = self._in_flight.popleft()
        with self._waits.measured():
            for handle in handles:
                handle.wait()


class Inbox:
    """Receives of rank ``rank`` posted ahead, at most ``capacity`` messages of them, taken in the order in which they
    were expected."""

    def __init__(
        self, rank: int, links: Links, shape: SupplyShape, device: torch.device, capacity: int
    ) -> None:
        self._rank = rank
        self._links = links
        self._shape = shape
        self._device = device
        self._capacity = capacity
        self._free: list[list[torch.Tensor]] = []
        self._expected: deque[tuple[list[Any], list[torch.Tensor]]] = deque()
        self._in_use: list[torch.Tensor] | None = None
        self._waits = Stopwatch(device)

    @property
    def waited_s(self) -> float:
        """Time spent on messages that were not there yet."""
        return self._waits.seconds

    @property
    def has_room(self) -> bool:
        """Whether another receive may be posted."""
        return len(self._expected) < self._capacity

    def expect(self, producer: int) -> None:
        """Post the receive of the next message of ``producer``."""
        buffers = self._free.pop() if self._free else self._shape.buffers(self._device)
        group = self._links.group(producer, self._rank)
        self._expected.append(([dist.irecv(buffer, producer, group=group) for buffer in buffers], buffers))

    def take(self) -> Supply:
        """Wait for the oldest expected message. It stays valid until the next call."""
        # On a GPU the next receive is ordered after the work already queued on the buffer that is given back.
        if self._in_use is not None:
            self._free.append(self._in_use)
        handles, buffers = self._expected.popleft()
        with self._waits.measured():
            for handle in handles:
                handle.wait()
        self._in_use = buffers
        return unpack(buffers)
