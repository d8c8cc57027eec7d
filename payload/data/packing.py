"""Documents into rows of one static length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Indices of the documents in each row, by best fit in order of falling length.

    No document is split and no row exceeds ``row_length``. The result depends on the arguments alone. Best fit
    decreasing needs at most 11/9 of the fewest rows possible, plus one. Raises ``ValueError`` when a document does
    not fit in a row by itself.
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for index in sorted(range(len(lengths)), key=lambda position: (-lengths[position], position)):
        length = lengths[index]
        if not 0 < length <= row_length:
            raise ValueError(f"a document of {length} tokens does not fit in a row of {row_length}")
        found = bisect_left(spaces, (length, -1))
        if found < len(spaces):
            free, row = spaces.pop(found)
        else:
            free, row = row_length, len(rows)
            rows.append([])
        rows[row].append(index)
        if free > length:
            insort(spaces, (free - length, row))
    return rows
