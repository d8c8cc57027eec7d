"""Keys and values of several texts at once, each as long as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class RowCache:
    """Keys and values of B rows, each filled up to a length of its own; a token's slot is its position.

    Nothing is ever taken out: what lies beyond a row's length (padding, refused drafts) is seen by nobody, as a token
    sees no later slot than its own, and what comes there next is written over it.
    """

    def __init__(self, layers: int, rows: int, capacity: int, device: torch.device) -> None:
        """For rows of at most ``capacity`` tokens, of which the last ones need not be kept."""
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers
        self.capacity = capacity
        self._held = [0] * rows
        self._lengths = torch.zeros(rows, dtype=torch.long, device=device)

    @property
    def bound(self) -> int:
        """The length of the longest row."""
        return max(self._held)

    def positions(self, count: int) -> Tensor:
        """Where each row's next ``count`` tokens go, int64 [B, count]."""
        return self._lengths[:, None] + torch.arange(count, device=self._lengths.device)

    def visible(self, count: int, window: int | None) -> Tensor:
        """Whom each row's next ``count`` tokens see, bool [B, 1, count, S]: S as `update` returns, themselves too.

        ``window`` is how many tokens a token reaches back, its own counted; ``None`` is without limit.
        """
        own = self.positions(count)[:, :, None]
        slot = torch.arange(self.bound + count, device=self._lengths.device)
        # Differences of positions would take eight times the mask's memory, which long prompts notice.
        seen = slot <= own
        if window is not None:
            seen &= slot > own - window
        return seen[:, None]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the next tokens' ``keys, values[B, heads, count, D]``; returns those of slots 0 .. S - 1.

        As transformers' layers call it. The rows are not longer until `advance` says so.
        """
        count = keys.shape[2]
        rows = torch.arange(len(self._held), device=keys.device)[:, None]
        where = self.positions(count)
        for stored, new in ((self._keys, keys), (self._values, values)):
            whole = stored[layer]
            if whole is None:
                shape = (new.shape[0], new.shape[1], self.capacity, new.shape[3])
                # Slots that no row has reached are masked, but 0 times what happens to lie there may not be 0.
                whole = stored[layer] = new.new_zeros(shape)
            whole[rows, :, where] = new.transpose(1, 2)
        return self.slots(layer, self.bound + count)

    def slots(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, count, D] of the first ``count`` slots of a layer that was written to."""
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None
        assert values is not None
        return keys[:, :, :count], values[:, :, :count]

    def advance(self, counts: Sequence[int] | int) -> None:
        """Each row is longer by so many of the tokens written last, every one by as many where one number is given."""
        if isinstance(counts, int):
            self._held = [held + counts for held in self._held]
            self._lengths += counts
            return
        self._held = [held + count for held, count in zip(self._held, counts, strict=True)]
        self._lengths = torch.tensor(self._held, device=self._lengths.device)

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows go on, in this order."""
        index = torch.tensor(list(rows), device=self._lengths.device)
        for stored in (self._keys, self._values):
            for layer, whole in enumerate(stored):
                stored[layer] = None if whole is None else whole.index_select(0, index)
        self._held = [self._held[row] for row in rows]
        self._lengths = self._lengths.index_select(0, index)
