"""How long this rank's device was at something, without holding the host up to find out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the time of what is `measured`.

    On a CPU it is the host's time. On a GPU, where the host runs ahead of it, it is the stream's: from when all work
    queued before was done to when the work inside was done, which is also how long the stream waited there if it
    waited for another rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: list[float] = []
        self._unread: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count what is done inside."""
        if not self._on_gpu:
            began = time.monotonic()
            yield
            self._seconds.append(time.monotonic() - began)
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._unread.append((before, after))

    @property
    def seconds(self) -> float:
        """All of it so far; on a GPU what is over."""
        return sum(self._read())

    @property
    def later_mean_s(self) -> float | None:
        """The mean of all but the first, in which things may compile; None before there are two."""
        later = self._read()[1:]
        return sum(later) / len(later) if later else None

    def _read(self) -> list[float]:
        while self._unread and self._unread[0][1].query():
            before, after = self._unread.popleft()
            self._seconds.append(before.elapsed_time(after) / 1000)
        return self._seconds
