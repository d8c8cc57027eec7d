"""A run that begins with the weights of an earlier one, and what is said to whom must begin so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from payload.drafter.checkpoint import load_config, load_drafter, save_drafter
from payload.drafter.model import DFlashDrafter
from payload.errors import PayloadError
from payload.places import ROOT_VARIABLE
from payload.trainer.checkpoint import read_checkpoint
from payload.trainer.initial import find_initial, initial_weights
from tests.payload.trainer.jobs import Job, run, tiny_recipe
from tests.payload.trainer.test_parts import CONFIG


@pytest.fixture(scope="module")
def finished(tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = run(tmp_path_factory.mktemp("root") / "runs" / "a", tiny_recipe(tiny_target_folder))
    assert job.wait() == [0], job.output()
    return job


def test_a_run_begins_with_the_very_weights_of_another(
    tiny_target_folder: Path, finished: Job, tmp_path: Path
) -> None:
    barely = {"optim__lr": 1e-30, "train__steps": 1, "train__seed": 5}
    exported = finished.run_dir / "checkpoints" / "step-000006" / "drafter"
    for number, name in enumerate((finished.run_dir, exported)):
        recipe = tiny_recipe(tiny_target_folder, train__from_pretrained=str(name), **barely)
        job = run(tmp_path / str(number), recipe)
        assert job.wait() == [0], job.output()
        assert f"beginning with the drafter of {name}" in job.output()
        begun = read_checkpoint(tmp_path / str(number) / "checkpoints" / "step-000001").weights
        for key, tensor in load_drafter(exported, dtype=torch.float32)[0].state_dict().items():
            assert torch.equal(begun[key], tensor), key


def test_every_drafter_begins_with_the_named_weights_and_a_resume_does_not_ask_for_them_again(
    tiny_target_folder: Path, finished: Job, tmp_path: Path
) -> None:
    exported = finished.run_dir / "checkpoints" / "step-000006" / "drafter"
    drafter, config = load_drafter(exported, dtype=torch.float32)
    copy = save_drafter(tmp_path / "drafter", drafter, config)
    first_losses = {}
    for name, drafters in (("one", [0]), ("two", [0, 1])):
        recipe = tiny_recipe(
            tiny_target_folder,
            train__from_pretrained=str(copy),
            train__accumulation=2 // len(drafters),
            topology__targets=[0],
            topology__drafters=drafters,
        )
        job = run(tmp_path / name, recipe)
        assert set(job.wait()) == {0}, job.output()
        first_losses[name] = list(job.losses().values())
    assert first_losses["two"] == pytest.approx(first_losses["one"], rel=1e-4)
    (copy / "config.json").unlink()
    again = run(tmp_path / "two", recipe)
    assert set(again.wait()) == {0}, again.output()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": 2, "layer_types": ()}, "num_layers is 1, and the recipe's 2"),
        ({"target_layer_ids": (2,)}, "target_layer_ids"),
        ({"mask_token_id": 30}, "mask_token_id is 31, and the recipe's 30"),
        ({"block_size": 8}, "block_size is 4, and the recipe's 8"),
        ({"rope_theta": 5.0}, "rope_theta"),
        ({"causal": True}, "causal is None, and the recipe's True"),
    ],
)
def test_a_drafter_of_another_shape_or_rule_is_refused_by_name(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    save_drafter(tmp_path, DFlashDrafter(CONFIG), CONFIG)
    assert find_initial(str(tmp_path), replace(CONFIG, eos_token_ids=(3,)), print) == tmp_path
    with pytest.raises(PayloadError) as caught:
        find_initial(str(tmp_path), replace(CONFIG, **change), print)  # type: ignore[arg-type]
    assert caught.value.kind == "refused"
    assert says in caught.value.message


def test_a_relative_name_counts_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = DFlashDrafter(CONFIG)
    save_drafter(tmp_path / "drafters" / "mine", drafter, CONFIG)
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    weights = initial_weights("drafters/mine", load_config(tmp_path / "drafters" / "mine"), print)
    assert torch.equal(weights["fc.weight"], drafter.fc.weight.bfloat16().float())
    with pytest.raises(PayloadError, match="There is no drafter in"):
        find_initial("drafters/yours", CONFIG, print)


def test_a_drafter_that_is_not_there_is_missed_before_any_answer_is_generated(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(
        tiny_target_folder, train__from_pretrained=str(tmp_path / "no"), data__regenerate=True
    )
    job = run(tmp_path / "run", recipe)
    assert job.wait() == [1]
    assert "There is no drafter in" in job.output()
    assert "answered" not in job.output()
    assert "Traceback" not in job.output()


def test_whoever_would_train_a_finished_run_on_is_told_how(
    tiny_target_folder: Path, finished: Job, tmp_path: Path
) -> None:
    more = run(
        finished.run_dir.parent / "b", tiny_recipe(tiny_target_folder, train__steps=9), resume_from="../a"
    )
    assert more.wait() == [1]
    assert "start a new run from its drafter: train.from_pretrained=runs/a" in more.output()
    same = run(finished.run_dir.parent / "c", tiny_recipe(tiny_target_folder), resume_from="../a")
    assert same.wait() == [0], same.output()
    assert "all 6 steps are done already" in same.output()
    assert "train.from_pretrained=runs/a" in same.output()
