import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from payload.drafter import checkpoint
from payload.drafter.card import model_card
from payload.drafter.checkpoint import load_config, load_drafter, save_drafter, tensor_shapes
from payload.drafter.config import FULL, SLIDING
from payload.drafter.model import DFlashDrafter
from payload.errors import PayloadError
from tests.payload.drafter.builders import tiny_config

CONFIG = tiny_config(num_layers=5, layer_types=(SLIDING, FULL, FULL, FULL, FULL), sliding_window=8)


@pytest.fixture
def drafter():
    torch.manual_seed(0)
    return DFlashDrafter(CONFIG)


@pytest.fixture
def saved(tmp_path, drafter):
    return save_drafter(tmp_path / "drafter", drafter, CONFIG)


def test_a_checkpoint_of_five_layers_holds_exactly_58_bf16_tensors(saved, drafter):
    tensors = load_file(saved / "model.safetensors")
    assert len(tensors) == 58
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == tensor_shapes(CONFIG)
    assert set(tensors) == set(drafter.state_dict())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_what_was_saved_loads_again_bit_for_bit(saved, drafter, tmp_path):
    loaded, config = load_drafter(saved)
    assert config == CONFIG
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16())
    again = save_drafter(tmp_path / "again", loaded, config)
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (saved / name).read_bytes()


def test_a_loaded_drafter_can_be_trained_on_in_fp32(saved):
    loaded, _ = load_drafter(saved, dtype=torch.float32)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in loaded.parameters())


def test_a_gathered_state_dict_is_saved_like_a_module(saved, drafter, tmp_path):
    other = save_drafter(tmp_path / "gathered", drafter.state_dict(), CONFIG)
    assert (other / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()


def test_a_failed_save_leaves_nothing_and_an_earlier_checkpoint_alone(saved, drafter, monkeypatch):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_drafter(saved, drafter, CONFIG)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_saving_again_replaces_the_folder_whole(saved, drafter):
    (saved / "stale.txt").write_text("old")
    save_drafter(saved, drafter, CONFIG, card="# card\n")
    assert sorted(path.name for path in saved.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def _rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda t: t.pop("layers.3.mlp.up_proj.weight"), "lacks layers.3.mlp.up_proj.weight"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(2)}), "unexpected lm_head.weight"),
        (
            lambda t: t.update({"fc.weight": torch.zeros(2, 3)}),
            r"fc.weight is \[2, 3\] instead of \[16, 32\]",
        ),
        (lambda t: [t.pop(name) for name in list(t)[:9]], "and 4 more"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(saved, change, part):
    _rewrite(saved, change)
    with pytest.raises(PayloadError, match=part) as caught:
        load_drafter(saved)
    assert caught.value.kind == "refused"
    assert str(saved) in caught.value.message
    assert "58 tensors" in caught.value.hint


def test_a_module_of_another_shape_is_not_saved(tmp_path, drafter):
    with pytest.raises(PayloadError, match="does not fit"):
        save_drafter(tmp_path / "drafter", drafter, tiny_config())
    assert list(tmp_path.iterdir()) == []


def test_a_cut_weights_file_is_refused(saved):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(PayloadError, match="could not be read"):
        load_drafter(saved)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_broken_configuration_is_refused(saved, text):
    (saved / "config.json").write_text(text)
    with pytest.raises(PayloadError, match=r"config\.json"):
        load_drafter(saved)


def test_missing_files_are_named(saved, tmp_path):
    (saved / "model.safetensors").unlink()
    with pytest.raises(PayloadError, match=r"model\.safetensors"):
        load_drafter(saved)
    with pytest.raises(PayloadError, match=r"config\.json does not exist"):
        load_drafter(tmp_path / "nowhere")


def test_weights_in_several_files_are_read_together(saved, drafter):
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    names = sorted(tensors)
    for part, chosen in enumerate((names[:30], names[30:])):
        save_file({name: tensors[name] for name in chosen}, saved / f"model-{part}.safetensors")
    loaded, _ = load_drafter(saved)
    assert torch.equal(loaded.state_dict()["norm.weight"], drafter.state_dict()["norm.weight"].bfloat16())


def test_the_configuration_reads_as_json_with_the_trained_rule(saved):
    content = json.loads((saved / "config.json").read_text())
    assert content["layer_types"] == list(CONFIG.layer_types)
    assert load_config(saved) == CONFIG


def test_the_model_card_tells_recipe_data_and_metrics():
    text = model_card(
        CONFIG,
        {"target": {"model": "Qwen/Qwen3-8B"}, "optim": {"lr": 6e-4}, "data": {"train": ("a|b.jsonl", "c")}},
        {"rows": 1200, "skipped": {"too short": 3}},
        {"accepted length": 3.14159265, "by position": [0.9, 0.5]},
    )
    assert "base_model: Qwen/Qwen3-8B" in text
    for row in (
        "| optim.lr | 0.0006 |",
        "| data.train | a\\|b.jsonl, c |",
        "| skipped.too short | 3 |",
        "| accepted length | 3.14159 |",
        "| by position | 0.9, 0.5 |",
    ):
        assert row in text
    serving = text.partition("## Serving")[2].partition("## Metrics")[0]
    assert '"num_speculative_tokens": 3' in serving
    assert serving.strip().startswith("Not tried by the project that trained this drafter")
