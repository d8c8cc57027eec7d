"""Who sees whom in the target: the form that a GPU runs against the dense reference, over random layouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from payload.data.batch import positions_of
from payload.drafter.tiles import TILE
from payload.target import Target
from payload.target_attention import (
    document_block_mask,
    document_mask,
    document_tiles,
    first_visible,
    mask_for,
)
from tests.payload.tiny_targets import tiny_model

LAYERS = (1, 3, 4)
SLIDING = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2}


@st.composite
def layouts(draw: st.DrawFn) -> Tensor:
    """document_ids [B, S] of rows of documents, each in one piece, padding at their ends."""
    length = draw(st.integers(1, 3 * TILE))
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        lengths = draw(st.lists(st.integers(1, max(1, length // 2)), max_size=8))
        ids = [document for document, size in enumerate(lengths) for _ in range(size)]
        rows.append((ids + [-1] * length)[:length])
    return torch.tensor(rows, dtype=torch.int32)


def tiles_of(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles of a dense mask [B, S, S] that hold something, and that hold nothing else."""
    length = dense.shape[1]
    padded = torch.zeros(len(dense), -(-length // TILE) * TILE, -(-length // TILE) * TILE, dtype=torch.bool)
    padded[:, :length, :length] = dense
    tiled = padded.unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE))
    return tiled.any(4).any(2), tiled.all(4).all(2)


@given(layouts(), st.none() | st.integers(1, 300))
@settings(max_examples=80, deadline=None)
def test_the_tiles_are_those_of_the_dense_mask(documents: Tensor, window: int | None) -> None:
    some, full = tiles_of(document_mask(documents, documents, window)[:, 0])
    tiles = document_tiles(first_visible(documents, window))
    assert torch.equal(tiles.full, full)
    assert torch.equal(tiles.partial, some & ~full)


@given(layouts(), st.none() | st.integers(1, 300))
@settings(max_examples=40, deadline=None)
def test_the_predicate_is_the_dense_mask(documents: Tensor, window: int | None) -> None:
    index = torch.arange(documents.shape[1])
    batch = torch.arange(len(documents))[:, None, None]
    mask = document_block_mask(documents, window)
    assert torch.equal(
        mask.mask_mod(batch, torch.tensor(0), index[:, None], index[None, :]),
        document_mask(documents, documents, window)[:, 0],
    )
    assert mask.seq_lengths == (documents.shape[1],) * 2


def test_no_mask_is_made_where_plain_causal_attention_will_do() -> None:
    ids = torch.zeros(1, 6, dtype=torch.long)
    assert mask_for(ids, None, None) is None
    assert mask_for(ids, None, 6) is None
    assert mask_for(ids, None, 5) is not None


def packed_rows(rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and documents [B, S], with padding at the end of each row."""
    generator = torch.Generator().manual_seed(seed)
    documents = torch.full((rows, length), -1, dtype=torch.int32)
    for row in range(rows):
        start = document = 0
        while start < length - 10:
            end = min(length - 7, start + int(torch.randint(3, 150, (1,), generator=generator)))
            documents[row, start:end] = document
            start, document = end, document + 1
    return torch.randint(0, 40, (rows, length), generator=generator), documents


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), [("qwen3", {}), ("llama", {}), ("qwen2", SLIDING)])
def test_compiled_layers_have_the_features_of_plain_ones_and_share_their_graphs(family: str, changes) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model(family, **changes)
    plain, compiled = Target(model), Target(model, compiled=True)
    for seed in range(2):
        ids, documents = packed_rows(2, 200, seed)
        where = {"document_ids": documents, "position_ids": positions_of(documents)}
        features = compiled.features(ids, LAYERS, **where)
        torch.testing.assert_close(features, plain.features(ids, LAYERS, **where), rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "changes"), [("qwen3", {}), ("llama", {}), ("qwen2", SLIDING)])
def test_on_a_gpu_packed_features_are_as_close_to_exact_ones_as_those_of_the_dense_mask(
    family: str, changes, dtype: torch.dtype, compiled: bool
) -> None:
    torch._dynamo.reset()
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, **changes}
    if family != "qwen2":
        sizes["head_dim"] = 32
    ids, documents = packed_rows(3, 700)
    positions = positions_of(documents)

    def error(dtype: torch.dtype, device: str, compiled: bool) -> float:
        target = Target(tiny_model(family, **sizes).to(device, dtype), compiled)
        where = {"document_ids": documents.to(device), "position_ids": positions.to(device)}
        features = target.features(ids.to(device), LAYERS, **where).cpu().double()
        return float(((features - exact)[documents >= 0]).norm() / exact[documents >= 0].norm())

    exact = Target(tiny_model(family, **sizes).double()).features(
        ids, LAYERS, document_ids=documents, position_ids=positions
    )
    # Random weights of this size make bfloat16 itself several percent off.
    allowed = 1e-2 if dtype == torch.float32 else 1.3 * error(dtype, "cpu", False)
    assert error(dtype, "cuda", compiled) < allowed


@pytest.mark.gpu
def test_on_a_gpu_features_wait_for_nothing_and_allocate_no_square() -> None:
    torch._dynamo.reset()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "max_position_embeddings": 20_000}
    target = Target(tiny_model(**sizes).cuda().bfloat16())
    ids, documents = (tensor.cuda() for tensor in packed_rows(1, 16_384))
    positions = positions_of(documents)

    def features() -> Tensor:
        return target.features(ids, LAYERS, document_ids=documents, position_ids=positions)

    features()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        features()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 16_384**2 / 4
