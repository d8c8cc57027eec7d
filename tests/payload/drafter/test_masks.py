"""The mask against the rule in words, in all its forms, and through the network that uses it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from payload.data.batch import Batch
from payload.drafter.anchors import Anchors
from payload.drafter.config import FULL, SLIDING, block_is_causal, layer_window
from payload.drafter.masks import allowed, build_masks, draft_mask, draft_masks, flex_mask, mask_mod
from payload.drafter.model import BlockEmbeddings, DFlashDrafter
from payload.drafter.step import block_inputs
from payload.drafter.tiles import TILE, mask_tiles
from tests.payload.drafter.builders import VOCABULARY, anchors_of, batches, random_batch, seeded, tiny_config

windows = st.one_of(st.none(), st.integers(1, 12))


def _sees(
    batch: Batch,
    anchors: Anchors,
    row: int,
    query: int,
    key: int,
    size: int,
    causal: bool,
    window: int | None,
) -> bool:
    """The rule, one pair at a time."""
    length = batch.input_ids.shape[1]
    block, slot = divmod(query, size)
    anchor = int(anchors.positions[row, block])
    if key < length:
        documents = batch.document_ids[row]
        return (
            bool(anchors.valid[row, block])
            and key < anchor
            and documents[key] == documents[anchor]
            and (window is None or (anchor + slot) - key < window)
        )
    other_block, other_slot = divmod(key - length, size)
    return (
        other_block == block
        and (not causal or other_slot <= slot)
        and (window is None or abs(slot - other_slot) < window)
    )


def _by_pairs(batch: Batch, anchors: Anchors, size: int, causal: bool, window: int | None) -> torch.Tensor:
    rows, length = batch.input_ids.shape
    slots = anchors.positions.shape[1] * size
    return torch.tensor(
        [
            [
                [
                    _sees(batch, anchors, row, query, key, size, causal, window)
                    for key in range(length + slots)
                ]
                for query in range(slots)
            ]
            for row in range(rows)
        ]
    )


@settings(deadline=None, max_examples=40)
@given(batch=batches, count=st.integers(1, 5), size=st.integers(2, 5), causal=st.booleans(), window=windows)
def test_the_dense_mask_is_the_rule(batch, count, size, causal, window):
    anchors = anchors_of(batch, count)
    dense = allowed(anchors, batch.document_ids, size, causal, window)
    assert torch.equal(dense, _by_pairs(batch, anchors, size, causal, window))


@settings(deadline=None, max_examples=40)
@given(batch=batches, count=st.integers(1, 12), size=st.integers(2, 9), causal=st.booleans(), window=windows)
def test_the_flex_predicate_equals_the_dense_mask(batch, count, size, causal, window):
    anchors = anchors_of(batch, count)
    dense = allowed(anchors, batch.document_ids, size, causal, window)
    predicate = mask_mod(anchors, batch.document_ids, size, causal, window)
    flex = create_mask(predicate, len(dense), 1, dense.shape[1], dense.shape[2], device="cpu")
    assert torch.equal(flex[:, 0], dense)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    length=st.integers(2, 500),
    documents=st.integers(1, 4),
    count=st.integers(1, 40),
    size=st.integers(2, 16),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 300)),
)
def test_the_tiles_in_closed_form_lose_no_allowed_pair_and_open_no_forbidden_one(
    seed, length, documents, count, size, causal, window
):
    batch = random_batch(seed, length=length, documents=documents)
    anchors = anchors_of(batch, count, seed)
    dense = allowed(anchors, batch.document_ids, size, causal, window)
    tiles = mask_tiles(anchors, batch.document_ids, size, window)
    partial, full = (
        tile.repeat_interleave(TILE, 1).repeat_interleave(TILE, 2)[:, : dense.shape[1], : dense.shape[2]]
        for tile in tiles
    )
    assert not (dense & ~(partial | full)).any()
    assert not (full & ~dense).any()
    assert not (partial & full).any()


def _reference_block_mask(
    anchors: Anchors, document_ids: torch.Tensor, size: int, window: int | None
) -> BlockMask:
    """By torch's own way, which writes the whole mask out."""
    queries = anchors.positions.shape[1] * size
    predicate = mask_mod(anchors, document_ids, size, False, window)
    shape = (len(document_ids), None, queries, document_ids.shape[1] + queries)
    return create_block_mask(predicate, *shape, device="cpu")


@pytest.mark.parametrize("window", [None, 200])
def test_the_block_mask_lists_the_tiles_that_torch_finds(window):
    """Without a window in a tile's way the lists are equal; with one, some tiles more are looked at."""
    batch = random_batch(seed=4, rows=2, length=900, documents=3)
    anchors = anchors_of(batch, 64)
    ours = flex_mask(anchors, batch.document_ids, 16, False, window)
    theirs = _reference_block_mask(anchors, batch.document_ids, 16, window)
    assert ours.shape == theirs.shape == (2, 1, 1024, 1924)
    assert not (theirs.to_dense().bool() & ~ours.to_dense().bool()).any()
    if window is None:
        assert torch.equal(ours.to_dense(), theirs.to_dense())
        for name in ("kv", "full_kv", "q", "full_q"):
            for part in (f"{name}_num_blocks", f"{name}_indices"):
                assert torch.equal(getattr(ours, part), getattr(theirs, part)), part
        assert ours.full_kv_num_blocks.sum() > 0
    assert ours.sparsity() > 50


@settings(deadline=None, max_examples=30)
@given(batch=batches, count=st.integers(1, 6), causal=st.booleans(), window=windows)
def test_every_query_sees_itself_so_no_softmax_is_empty(batch, count, causal, window):
    dense = allowed(anchors_of(batch, count), batch.document_ids, 4, causal, window)
    own = dense[:, :, batch.input_ids.shape[1] :]
    assert own.diagonal(dim1=1, dim2=2).all()


def test_one_mask_is_built_for_each_layer_type_by_its_own_rule():
    config = tiny_config(num_layers=3, layer_types=(SLIDING, FULL, SLIDING), sliding_window=6)
    batch = random_batch(seed=2)
    anchors = anchors_of(batch, 3)
    masks = build_masks(config, anchors, batch.document_ids, "dense")
    assert set(masks) == {FULL, SLIDING}
    for kind, mask in masks.items():
        rule = (block_is_causal(kind, config), layer_window(kind, config))
        assert torch.equal(mask[:, 0], allowed(anchors, batch.document_ids, 4, *rule))
    assert not torch.equal(masks[FULL], masks[SLIDING])


def _reaches(masks: list[torch.Tensor], length: int) -> torch.Tensor:
    """Which inputs can influence which slots through all layers: bool [slots, S + slots]."""
    slots = masks[0].shape[0]
    reach = torch.cat(
        [torch.zeros(slots, length, dtype=torch.bool), torch.eye(slots, dtype=torch.bool)], dim=1
    )
    for mask in masks:
        through_slots = (mask[:, length:].float() @ reach.float()) > 0
        direct = torch.cat([mask[:, :length], torch.zeros(slots, slots, dtype=torch.bool)], dim=1)
        reach = reach | through_slots | direct
    return reach


@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, FULL), (SLIDING, SLIDING)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_change_of_any_input_moves_exactly_the_slots_that_may_see_it(layer_types, seed):
    """No leak: forbidden inputs leave the output's bits alone, allowed ones do not. One changed input a row."""
    torch.manual_seed(seed)
    config = tiny_config(layer_types=layer_types, sliding_window=5, initializer_range=0.3)
    drafter = DFlashDrafter(config).double()
    batch = random_batch(seed, rows=1, length=14, documents=2, supervised=1.0)
    anchors = anchors_of(batch, 3, seed)
    inputs = block_inputs(config, torch.randn(VOCABULARY, 16), batch, anchors, torch.float64, kernel="dense")
    length, blocks, size = 14, 3, config.block_size
    count = length + blocks
    features = torch.randn(1, length, 32, dtype=torch.float64).repeat(count, 1, 1)
    anchor_embeddings = torch.randn(1, blocks, 16, dtype=torch.float64).repeat(count, 1, 1)

    def run(features: torch.Tensor, anchor_embeddings: torch.Tensor) -> torch.Tensor:
        masks = {kind: mask.expand(count, -1, -1, -1) for kind, mask in inputs.masks.items()}
        rotary = tuple(table.expand(count, -1, -1, -1) for table in inputs.rotary)
        embeddings = BlockEmbeddings(anchor_embeddings, inputs.embeddings.mask)
        with torch.no_grad():
            return drafter(features, embeddings, rotary, masks).flatten(1, 2)

    before = run(features, anchor_embeddings)
    for index in range(length):
        features[index, index] += torch.randn(32, generator=seeded(index), dtype=torch.float64)
    for block in range(blocks):
        change = torch.randn(16, generator=seeded(block), dtype=torch.float64)
        anchor_embeddings[length + block, block] += change
    changed = (run(features, anchor_embeddings) != before).any(-1).T  # [drafted slots, inputs]
    per_layer = [inputs.masks[kind][0, 0] for kind in layer_types]
    expected = _reaches(per_layer, length)
    drafted = torch.arange(blocks * size) % size > 0
    first_slots = length + torch.arange(blocks) * size
    assert torch.equal(changed, expected[drafted][:, [*range(length), *first_slots.tolist()]])


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    spare=st.integers(1, 3),
    size=st.integers(1, 5),
    causal=st.booleans(),
    window=windows,
)
@settings(max_examples=60, deadline=None)
def test_decoding_follows_the_rule_of_training_whatever_each_rows_context(
    lengths: list[int], spare: int, size: int, causal: bool, window: int | None
) -> None:
    """A block behind a context is a block whose anchor stands at the context's end."""
    context, anchor = max(lengths) + spare, torch.tensor(lengths)[:, None]
    anchors = Anchors(anchor, torch.ones_like(anchor, dtype=torch.bool))
    trained = allowed(anchors, torch.zeros(len(lengths), context), size, causal, window)
    assert torch.equal(draft_mask(anchor + torch.arange(size), context, causal, window)[:, 0], trained)


def test_only_a_layer_that_sees_all_of_a_filled_context_needs_no_mask_to_decode() -> None:
    config = tiny_config(layer_types=(FULL, SLIDING), sliding_window=3)
    positions = 5 + torch.arange(4)[None]
    filled = draft_masks(config, positions, 5, filled=True)
    assert filled[FULL] is None
    for kind, mask in draft_masks(config, positions, 5, filled=False).items():
        assert mask is not None
        assert torch.equal(filled[kind] if filled[kind] is not None else torch.ones_like(mask), mask)  # type: ignore[arg-type]
