"""What a drafted block may know, in words, against what moves it: every input of random rows is changed in turn."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from payload.data.batch import Batch
from payload.drafter.anchors import Anchors
from payload.drafter.config import FULL, SLIDING, DrafterConfig
from payload.drafter.model import DFlashDrafter
from payload.drafter.step import block_inputs
from tests.payload.drafter.builders import VOCABULARY, anchors_of, batches, random_batch, seeded, tiny_config

WINDOW = 5
LAYERS = [(FULL, FULL), (SLIDING, FULL), (SLIDING, SLIDING)]
rows = batches.filter(lambda batch: len(batch.input_ids) == 1)


def drafter_of(config: DrafterConfig) -> DFlashDrafter:
    torch.manual_seed(0)
    return DFlashDrafter(config).double()


def blocks(
    drafter: DFlashDrafter, batch: Batch, features: torch.Tensor, anchors: Anchors, embedding: torch.Tensor
) -> torch.Tensor:
    """What training computes of each block, [B, A, (K - 1) * H]."""
    inputs = block_inputs(drafter.config, embedding, batch, anchors, torch.float64, "dense")
    with torch.no_grad():
        hidden = drafter(features, inputs.embeddings, inputs.rotary, inputs.masks)
    return hidden.flatten(2)


def may_know(batch: Batch, anchor: int, index: int, layer_types: tuple[str, ...]) -> bool:
    """Whether a block may know the target's feature at ``index``: what was read before the anchor in its document,
    and where all layers slide no further back than the first slot's window."""
    documents = batch.document_ids[0]
    in_reach = FULL in layer_types or anchor - index < WINDOW
    return index < anchor and bool(documents[index] == documents[anchor]) and in_reach


@pytest.mark.parametrize("causal", [None, False, True])
@pytest.mark.parametrize("layer_types", LAYERS)
@settings(deadline=None, max_examples=40)
@given(batch=rows, count=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_block_knows_the_features_before_its_anchor_and_no_other(layer_types, causal, batch, count, seed):
    config = tiny_config(layer_types=layer_types, sliding_window=WINDOW, causal=causal, initializer_range=0.3)
    drafter, anchors = drafter_of(config), anchors_of(batch, count, seed)
    length = batch.input_ids.shape[1]
    # One changed feature a row; each row is compared with itself, for a row's bits may depend on where it lies.
    many = Batch(*(tensor.expand(length, -1) for tensor in batch.tensors()))
    each = Anchors(*(tensor.expand(length, -1) for tensor in anchors))
    embedding = torch.randn(VOCABULARY, 16, generator=seeded(1), dtype=torch.float64)
    features = torch.randn(1, length, 32, generator=seeded(seed), dtype=torch.float64).repeat(length, 1, 1)
    before = blocks(drafter, many, features, each, embedding)
    features[range(length), range(length)] += 1.0
    moved = (blocks(drafter, many, features, each, embedding) != before).any(-1)
    for block, anchor in enumerate(anchors.positions[0].tolist()):
        valid = bool(anchors.valid[0, block])
        for index in range(length):
            expected = valid and may_know(batch, anchor, index, layer_types)
            assert bool(moved[index, block]) == expected, (block, anchor, index)


@pytest.mark.parametrize("layer_types", LAYERS)
def test_of_a_rows_tokens_a_block_knows_its_anchor_alone(layer_types):
    """The tokens that it is to predict, above all, are no input of it."""
    config = tiny_config(layer_types=layer_types, sliding_window=WINDOW, initializer_range=0.3)
    drafter, batch = drafter_of(config), random_batch(3, rows=1, length=20, documents=2, supervised=1.0)
    anchors = anchors_of(batch, 4)
    features = torch.randn(1, 20, 32, generator=seeded(2), dtype=torch.float64)
    embedding = torch.randn(VOCABULARY, 16, generator=seeded(1), dtype=torch.float64)
    before = blocks(drafter, batch, features, anchors, embedding)
    for index in range(20):
        ids = batch.input_ids.clone()
        ids[0, index] = (ids[0, index] + 1) % (VOCABULARY - 1)
        after = blocks(drafter, Batch(ids, *batch.tensors()[1:]), features, anchors, embedding)
        moved = (after != before).any(-1)[0]
        assert torch.equal(moved, anchors.positions[0] == index)
