import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from payload.data.batch import positions_of
from payload.errors import PayloadError
from payload.recipe import TargetSpec
from payload.target import Target
from tests.payload.tiny_gguf import write_gguf
from tests.payload.tiny_targets import FAMILIES, tiny_model, tiny_target

LAYERS = (1, 3, 4)
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
VARIANTS = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", SLIDING),
    ("qwen3", SLIDING),
]


def _tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _hidden_states(target: Target, ids: Tensor, layers: tuple[int, ...] = LAYERS, **options) -> Tensor:
    states = target.model(ids, output_hidden_states=True, **options).hidden_states
    return torch.cat([states[layer + 1] for layer in layers], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_features_are_transformers_hidden_states_bit_for_bit(family, changes, dtype):
    target = Target(tiny_model(family, **changes).to(dtype))
    ids = _tokens(3, 17)
    features = target.features(ids, LAYERS)
    assert features.shape == (3, 17, 96)
    assert torch.equal(features, _hidden_states(target, ids))


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_right_padding_does_not_touch_the_features_of_real_tokens(family, changes):
    target = tiny_target(family, **changes)
    ids, lengths = _tokens(3, 14), (14, 9, 1)
    mask = torch.arange(14)[None] < torch.tensor(lengths)[:, None]
    expected = _hidden_states(target, ids, attention_mask=mask.long())
    documents = torch.where(mask, 0, -1).int()
    for features in (target.features(ids, LAYERS), target.features(ids, LAYERS, document_ids=documents)):
        torch.testing.assert_close(features[mask], expected[mask])
        assert features.isfinite().all(), "padding never becomes NaN"


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_packed_documents_have_the_features_they_have_alone(family, changes):
    target = tiny_target(family, **changes)
    documents = torch.tensor([[0] * 7 + [1] * 2 + [2] * 6 + [-1], [4] * 3 + [5] * 11 + [-1] * 2]).int()
    ids = _tokens(2, 16)
    packed = target.features(ids, LAYERS, document_ids=documents, position_ids=positions_of(documents))
    for row in range(2):
        for document in documents[row].unique().tolist():
            own = documents[row] == document
            if document >= 0:
                torch.testing.assert_close(packed[row, own], _hidden_states(target, ids[row, own][None])[0])


def test_a_packed_document_is_blind_to_its_neighbours():
    target = tiny_target()
    documents = torch.tensor([[0] * 5 + [1] * 6]).int()
    ids = _tokens(1, 11)
    options = {"document_ids": documents, "position_ids": positions_of(documents)}
    before = target.features(ids, LAYERS, **options)
    ids[0, :5] = (ids[0, :5] + 1) % 40
    after = target.features(ids, LAYERS, **options)
    assert torch.equal(before[0, 5:], after[0, 5:])
    assert not torch.equal(before[0, :5], after[0, :5])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layers_feature_is_its_raw_output_without_the_final_norm(family):
    target = tiny_target(family)
    ids = _tokens(2, 9)
    raw = target.features(ids, (5,))
    normed = _hidden_states(target, ids, layers=(5,))
    assert not torch.allclose(raw, normed)
    with torch.no_grad():
        torch.testing.assert_close(target.model.model.norm(raw), normed)


def test_nothing_behind_the_deepest_layer_asked_for_is_run():
    target = tiny_target()
    base = target.model.model

    def never(*args):
        raise AssertionError("ran a module that no feature needs")

    for module in (*base.layers[5:], base.norm, target.model.lm_head):
        module.register_forward_pre_hook(never)
    target.features(_tokens(1, 5), LAYERS)


def test_features_can_be_trained_on_but_never_reach_the_target():
    target = tiny_target()
    features = target.features(_tokens(1, 5), LAYERS)
    assert not features.requires_grad
    weight = torch.ones(96, requires_grad=True, dtype=torch.float64)
    (features * weight).sum().backward()
    assert weight.grad is not None
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_final_hidden_states_come_with_the_features_and_give_the_logits():
    target = tiny_target()
    ids = _tokens(2, 8)
    features, final = target.features_and_final(ids, LAYERS)
    assert torch.equal(features, target.features(ids, LAYERS))
    with torch.no_grad():
        torch.testing.assert_close(final @ target.head_weight.T, target.model(ids).logits)


def test_layers_come_in_the_order_asked_for_and_absent_ones_are_refused():
    target = tiny_target()
    ids = _tokens(1, 4)
    one, three = target.features(ids, (1,)), target.features(ids, (3,))
    assert torch.equal(target.features(ids, (3, 1)), torch.cat([three, one], dim=-1))
    with pytest.raises(PayloadError, match="6 layers"):
        target.features(ids, (6,))


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_cached_steps_continue_and_can_be_taken_back(family, changes):
    target = tiny_target(family, **changes)
    ids = _tokens(1, 20)
    expected = target.features(ids, LAYERS)
    with torch.no_grad():
        logits = target.model(ids).logits
    cache = target.new_cache()
    first = target.step(ids[:, :9], cache, LAYERS, last_logits_only=True)
    target.step((ids[:, 9:14] + 1) % 40, cache, LAYERS)
    cache.crop(-5)
    second = target.step(ids[:, 9:], cache, LAYERS)
    torch.testing.assert_close(torch.cat([first.features, second.features], dim=1), expected)
    torch.testing.assert_close(first.logits, logits[:, 8:9])
    torch.testing.assert_close(second.logits, logits[:, 9:])


def test_tied_embeddings_are_the_head():
    assert torch.equal(
        *(getattr(tiny_target(tie_word_embeddings=True), n) for n in ("embedding_weight", "head_weight"))
    )
    target = tiny_target()
    assert not torch.equal(target.embedding_weight, target.head_weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_loads_from_its_folder(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    target = Target.load(TargetSpec(str(tmp_path), dtype="float32"))
    assert torch.equal(target.features(_tokens(1, 5), LAYERS), Target(model).features(_tokens(1, 5), LAYERS))
    assert Target.load(TargetSpec(str(tmp_path), dtype="bfloat16")).dtype == torch.bfloat16


def test_random_weights_need_only_the_configuration(tmp_path):
    tiny_model().config.save_pretrained(tmp_path)
    own_dtype = Target.load(TargetSpec(str(tmp_path), random_weights=True))
    assert own_dtype.dtype == torch.float32
    target = Target.load(TargetSpec(str(tmp_path), dtype="bfloat16", random_weights=True))
    assert target.dtype == torch.bfloat16
    again = Target.load(TargetSpec(str(tmp_path), dtype="bfloat16", random_weights=True))
    assert torch.equal(target.head_weight, again.head_weight), "every rank has the same weights"
    assert target.features(_tokens(1, 5), LAYERS).isfinite().all()


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_loads_with_the_same_features(tied, tmp_path):
    model = tiny_model("llama", tie_word_embeddings=tied)
    write_gguf(tmp_path / "tiny.gguf", model)
    target = Target.load(TargetSpec(str(tmp_path), gguf_file="tiny.gguf", dtype="float32"))
    assert target.config.model_type == "llama"
    assert (target.head_weight is target.embedding_weight) == tied
    features = target.features(_tokens(1, 7), LAYERS)
    torch.testing.assert_close(features, Target(model).features(_tokens(1, 7), LAYERS), rtol=1e-4, atol=1e-4)


def test_the_packed_weights_of_a_gguf_file_become_plain_ones_of_the_asked_type(tmp_path, caplog, request):
    from transformers.utils import logging as transformers_logging

    transformers_logging.enable_propagation()
    request.addfinalizer(transformers_logging.disable_propagation)
    model = tiny_model("llama", hidden_size=64, intermediate_size=96)
    write_gguf(tmp_path / "tiny.gguf", model, packed=True)
    target = Target.load(TargetSpec(str(tmp_path), gguf_file="tiny.gguf", dtype="bfloat16"))
    layer = target.model.model.layers[0].mlp.down_proj
    assert type(layer) is torch.nn.Linear
    assert layer.weight.dtype == target.head_weight.dtype == torch.bfloat16
    torch.testing.assert_close(
        layer.weight.float(), model.model.layers[0].mlp.down_proj.weight, rtol=0.01, atol=0.01
    )
    # Left to itself, transformers unpacks only because it finds no kernels, and says so.
    assert "packed" not in caplog.text
    assert "Dequantizing the whole model" not in caplog.text


def test_another_family_is_refused_with_the_list_of_supported_ones(tmp_path):
    from transformers import GPT2Config

    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(PayloadError, match="gpt2") as caught:
        Target.load(TargetSpec(str(tmp_path)))
    assert caught.value.kind == "refused"
    for family in FAMILIES:
        assert family in caught.value.hint


def test_a_folder_that_lacks_a_weight_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PayloadError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        Target.load(TargetSpec(str(tmp_path)))


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        (TargetSpec("./no/such/folder"), "there is no folder"),
        (TargetSpec("/no/such/folder"), "there is no folder"),
    ],
)
def test_a_folder_that_is_not_there_is_named(spec, part):
    with pytest.raises(PayloadError, match=part):
        Target.load(spec)


def test_an_empty_folder_or_an_absent_gguf_file_is_named(tmp_path):
    with pytest.raises(PayloadError, match="could not be loaded"):
        Target.load(TargetSpec(str(tmp_path)))
    with pytest.raises(PayloadError, match=r"no tiny\.gguf"):
        Target.load(TargetSpec(str(tmp_path), gguf_file="tiny.gguf"))
