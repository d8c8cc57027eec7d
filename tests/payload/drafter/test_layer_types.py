"""A layer type is one line of a table: everything else follows from it."""

import pytest
import torch

from payload.drafter.config import FULL, LAYER_TYPES, SLIDING, LayerType, block_is_causal, layer_window
from payload.drafter.masks import build_masks
from payload.drafter.model import DFlashDrafter
from payload.drafter.step import block_inputs
from payload.drafter.zlab_config import config_from_json, config_to_json
from payload.errors import PayloadError
from payload.recipe import load_recipe
from tests.payload.drafter.builders import VOCABULARY, anchors_of, random_batch, tiny_config

NEW = "new_attention"


@pytest.fixture(params=[(True, False), (False, True), (True, True)])
def new_type(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LayerType:
    kind = LayerType(*request.param)
    monkeypatch.setitem(LAYER_TYPES, NEW, kind)
    return kind


def test_a_new_type_is_trained_drafted_exported_and_named_by_a_recipe(new_type: LayerType) -> None:
    config = tiny_config(layer_types=(NEW, FULL), sliding_window=5, initializer_range=0.3)
    assert block_is_causal(NEW, config) == new_type.causal
    assert layer_window(NEW, config) == (5 if new_type.windowed else None)
    read = config_from_json(config_to_json(config))
    assert read.layer_types == (NEW, FULL)
    assert read.sliding_window == (5 if new_type.windowed else None)
    recipe = load_recipe("tiny-cpu", {"drafter": {"layer_types": [NEW, FULL], "sliding_window": 5}})
    assert recipe.drafter.layer_types == (NEW, FULL)

    torch.manual_seed(0)
    drafter = DFlashDrafter(config).double()
    batch = random_batch(seed=5, rows=1, length=20, documents=1, supervised=1.0)
    anchors = anchors_of(batch, 3)
    features = torch.randn(1, 20, 32, dtype=torch.float64)
    embedding = torch.randn(VOCABULARY, 16, dtype=torch.float64)
    inputs = block_inputs(config, embedding, batch, anchors, torch.float64, "dense")
    with torch.no_grad():
        trained = drafter(features, inputs.embeddings, inputs.rotary, inputs.masks)
    for block, anchor in enumerate(anchors.positions[0].tolist()):
        cache = drafter.new_cache(1, 20, torch.device("cpu"), torch.float64)
        positions = torch.arange(20 + config.block_size)[None]
        ids = torch.tensor([[int(batch.input_ids[0, anchor]), *[config.mask_token_id] * 3]])
        with torch.no_grad():
            drafter.extend_context(features[:, :anchor], positions[:, :anchor], cache)
            drafted = drafter.draft(embedding[ids], positions[:, anchor : anchor + 4], cache)
        torch.testing.assert_close(drafted[:, 1:], trained[:, block], rtol=1e-5, atol=1e-6)


def test_the_types_of_the_table_have_masks_of_their_own() -> None:
    config = tiny_config(layer_types=tuple(LAYER_TYPES), sliding_window=4)
    batch = random_batch(seed=2)
    masks = build_masks(config, anchors_of(batch, 3), batch.document_ids, "dense")
    assert set(masks) == set(LAYER_TYPES) == {FULL, SLIDING}


def test_a_recipe_with_a_type_that_is_not_in_the_table_is_refused_with_those_that_are() -> None:
    with pytest.raises(PayloadError, match="full_attention or sliding_attention") as caught:
        load_recipe("tiny-cpu", {"drafter.layer_types": ["chunked_attention", FULL]})
    assert "chunked_attention" in caught.value.message
