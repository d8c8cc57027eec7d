import dataclasses
import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from payload.drafter.config import (
    FULL,
    SLIDING,
    DrafterConfig,
    block_is_causal,
    default_target_layer_ids,
    layer_window,
)
from payload.drafter.zlab_config import config_from_json, config_to_json
from payload.errors import PayloadError
from tests.payload.drafter.builders import tiny_config


def _target_config(**changes):
    values = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "pad_token_id": 151643,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize(
    ("target", "draft", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 1, (18,)),
        (6, 2, (1, 3)),
        (30, 5, (1, 8, 14, 20, 27)),
    ],
)
def test_default_layers_are_spread_from_the_second_to_the_third_last(target, draft, ids):
    assert default_target_layer_ids(target, draft) == ids


@pytest.mark.parametrize(("target", "draft"), [(4, 3), (3, 2), (2, 5)])
def test_a_target_too_shallow_for_distinct_layers_is_refused(target, draft):
    with pytest.raises(PayloadError, match=f"{target} layers"):
        default_target_layer_ids(target, draft)


def test_a_drafter_takes_its_shape_from_the_target():
    config = DrafterConfig.for_target(_target_config(), mask_token_id=151669)
    assert (config.hidden_size, config.vocab_size, config.num_target_layers) == (4096, 151936, 36)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert (config.num_layers, config.block_size, config.layer_types) == (5, 16, (FULL,) * 5)
    assert config.rope_theta == 1e6


def test_rotary_scaling_of_the_target_is_not_inherited():
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "mrope_section": [8, 12, 12]}
    config = DrafterConfig.for_target(_target_config(rope_parameters=scaled), mask_token_id=151669)
    written = config_to_json(config)
    assert written["rope_scaling"] is None
    assert written["rope_parameters"] == {"rope_theta": 5e5, "rope_type": "default"}


def test_a_head_size_that_serving_engines_cannot_page_becomes_128():
    assert DrafterConfig.for_target(_target_config(head_dim=160), mask_token_id=151669).head_dim == 128
    assert DrafterConfig.for_target(_target_config(head_dim=64), mask_token_id=151669).head_dim == 64


@pytest.mark.parametrize(
    ("mask", "part"),
    [
        (151936, "no row"),
        (-1, "no row"),
        (151643, "pad"),
        (151645, "eos"),
        (None, "no row"),
        (True, "no row"),
    ],
)
def test_a_mask_token_that_is_no_row_or_already_means_something_is_refused(mask, part):
    with pytest.raises(PayloadError, match=part) as caught:
        DrafterConfig.for_target(_target_config(), mask_token_id=mask)
    assert caught.value.kind == "usage"


def test_the_mask_token_is_checked_against_the_rows_that_the_embedding_really_has():
    with pytest.raises(PayloadError, match="no row"):
        DrafterConfig.for_target(_target_config(), mask_token_id=151700, embedding_rows=151680)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"target_layer_ids": (1, 6)}, "0 to 5"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"target_layer_ids": (3, 1)}, "ascend"),
        ({"target_layer_ids": (1, 1)}, "ascend"),
        ({"layer_types": (FULL,)}, "1 entries for 2"),
        ({"layer_types": (FULL, "chunked_attention")}, "chunked_attention"),
        ({"layer_types": (FULL, SLIDING)}, "sliding_window"),
        ({"block_size": 1}, "block_size"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"head_dim": 7}, "even"),
        ({"hidden_size": 0}, "hidden_size"),
    ],
)
def test_values_that_do_not_fit_together_are_refused_by_name(changes, part):
    with pytest.raises(PayloadError, match=part) as caught:
        tiny_config(**changes)
    assert caught.value.kind == "usage"


@pytest.mark.parametrize(
    ("causal", "full", "sliding"), [(None, False, True), (False, False, False), (True, True, True)]
)
def test_blocks_are_causal_by_layer_type_unless_the_configuration_says_otherwise(causal, full, sliding):
    config = tiny_config(layer_types=(FULL, SLIDING), sliding_window=8, causal=causal)
    assert block_is_causal(FULL, config) is full
    assert block_is_causal(SLIDING, config) is sliding
    assert layer_window(FULL, config) is None
    assert layer_window(SLIDING, config) == 8


configs = st.builds(
    tiny_config,
    layer_types=st.lists(st.sampled_from([FULL, SLIDING]), min_size=2, max_size=2).map(tuple),
    sliding_window=st.integers(1, 4096),
    causal=st.sampled_from([None, True, False]),
    block_size=st.integers(2, 32),
    rope_theta=st.sampled_from([1e4, 5e5, 1e6]),
    eos_token_ids=st.sampled_from([(), (3,), (3, 5)]),
    pad_token_id=st.sampled_from([None, 0]),
    target_layer_ids=st.sets(st.integers(0, 5), min_size=1).map(lambda ids: tuple(sorted(ids))),
)


@settings(deadline=None, max_examples=100)
@given(config=configs)
def test_a_configuration_survives_its_file(config):
    read = config_from_json(json.loads(json.dumps(config_to_json(config))))
    if SLIDING not in config.layer_types:
        config = dataclasses.replace(config, sliding_window=None)
    assert read == config


def test_every_key_is_written_where_old_and_new_readers_look():
    config = tiny_config(layer_types=(SLIDING, SLIDING), sliding_window=8, causal=False)
    written = config_to_json(config)
    inner = written["dflash_config"]
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["model_type"] == "qwen3"
    assert written["block_size"] == inner["block_size"] == 4
    assert written["is_causal"] is inner["causal"] is False
    assert written["sliding_window"] == inner["swa_window_size"] == 8
    assert written["use_sliding_window"] is inner["use_swa"] is True
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"]
    assert inner["target_layer_ids"] == [1, 3]
    assert inner["mask_token_id"] == 49


@pytest.mark.parametrize("at_top", [True, False])
def test_the_block_size_is_found_in_either_place(at_top):
    content = config_to_json(tiny_config())
    del (content["dflash_config"] if at_top else content)["block_size"]
    assert config_from_json(content).block_size == 4


def test_an_older_file_without_layer_types_or_rope_parameters_is_read():
    content = config_to_json(tiny_config())
    for key in ("layer_types", "rope_parameters", "use_cache", "sliding_window"):
        del content[key]
    assert config_from_json(content) == tiny_config()


def test_the_flag_for_sliding_attention_alone_means_sliding_layers_that_are_not_causal():
    content = config_to_json(tiny_config())
    content["dflash_config"] |= {"use_swa": True, "swa_window_size": 9}
    config = config_from_json(content)
    assert config.layer_types == (SLIDING, SLIDING)
    assert config.sliding_window == 9
    assert block_is_causal(SLIDING, config) is False


def _changed(**changes):
    content = config_to_json(tiny_config(layer_types=(SLIDING, FULL), sliding_window=8, causal=True))
    for key, value in changes.items():
        place, _, name = key.rpartition("__")
        (content[place] if place else content)[name] = value
    return content


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"block_size": 8}, "block_size twice"),
        ({"is_causal": False}, "causal twice"),
        ({"dflash_config__swa_window_size": 9}, "sliding_window twice"),
        ({"rope_theta": 1e4}, "rope_theta twice"),
        ({"dflash_config": None}, "no dflash_config"),
        ({"dflash_config__target_layer_ids": None}, "target_layer_ids"),
        ({"dflash_config__mask_token_id": None}, "mask_token_id"),
        ({"dflash_config__mask_token_id": 50}, "no row"),
        ({"eos_token_id": 49}, "eos"),
        ({"num_target_layers": None}, "num_target_layers"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"architectures": ["DFlashSpeculator"]}, "DFlashSpeculator"),
        ({"dflash_config__selector_rank": 256}, "selector_rank"),
        ({"dflash_config__attention_sink_bias": True}, "attention_sink_bias"),
        ({"dflash_config__final_logit_softcapping": 20.0}, "softcapping"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rotary scaling"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "rotary scaling"),
        ({"rope_scaling": {"mrope_section": [1, 1, 2]}}, "rotary scaling"),
        ({"layer_types": ["full_attention"]}, "1 entries"),
    ],
)
def test_what_is_missing_contradictory_or_unsupported_is_refused_with_file_and_key(changes, part):
    with pytest.raises(PayloadError, match=part) as caught:
        config_from_json(_changed(**changes), "drafts/config.json")
    assert caught.value.kind == "refused"
    assert caught.value.message.startswith("drafts/config.json ")


def test_keys_that_say_what_is_so_anyway_are_read():
    neutral = {"dflash_config__input_embedding_scale": 1.0, "dflash_config__attention_sink_bias": False}
    extra = {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "transformers_version": "4.57.0"}
    assert config_from_json(_changed(**neutral, **extra)) == config_from_json(_changed())
