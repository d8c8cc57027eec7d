"""Another seed, or another number of what is drawn for, gives other random numbers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from payload.seeds import seed_of

PARTS = st.tuples(st.integers(0, 2**63), st.integers(0, 2**40))


@given(st.lists(PARTS, min_size=2, max_size=9, unique=True))
def test_other_parts_draw_other_numbers_on_a_cpu(parts: list[tuple[int, int]]) -> None:
    drawn = {
        tuple(torch.rand(4, generator=torch.Generator().manual_seed(seed_of(*one))).tolist()) for one in parts
    }
    assert len(drawn) == len(parts)
    assert seed_of(*parts[0]) == seed_of(*parts[0])
