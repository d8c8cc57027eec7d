"""What a job leaves behind: metrics, the best checkpoint, a model card, and a state to go on from elsewhere."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from payload.data.sealed import open_sealed
from payload.drafter.checkpoint import CARD_FILE
from payload.trainer.metrics import MetricsLog
from tests.payload.trainer.jobs import run, started, tiny_recipe


def strict(line: str) -> dict[str, Any]:
    """A line of JSON as other readers take it: without NaN and infinities."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    parsed: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return parsed


def test_a_run_is_measured_in_json_and_in_tensorboard_alike(tiny_target_folder: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    apart = {"topology__targets": [0], "topology__drafters": [1]}
    recipe = tiny_recipe(tiny_target_folder, train__steps=4, data__eval=["demo"], data__eval_rows=2, **apart)
    job = run(tmp_path, recipe)
    assert job.wait() == [0, 0], job.output()
    lines = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    of_step = next(line for line in lines if line["event"] == "train" and line["step"] == 3)
    for name in (
        "loss", "accuracy", "simulated_accepted_length", "learning_rate", "gradient_norm", "tokens_per_s",
        "draft_tokens_per_s", "step_s", "tflops_per_s", "transfer_wait_s", "data_wait_s", "memory_bytes", "tokens_seen",
    ):  # fmt: skip
        assert of_step[name] >= 0, name
    assert len(of_step["accuracy_by_position"]) == 3
    assert of_step["mfu"] is None, "the peak of a CPU is not known"
    evaluated = [line for line in lines if line["event"] == "eval"]
    assert all(line["accepted_length"] >= 1 and len(line["accepted_by_position"]) == 3 for line in evaluated)
    assert evaluated[-1]["speedup"] > 0

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    for name in ("loss", "gradient_norm", "tokens_per_s", "transfer_wait_s", "memory_bytes"):
        shown = {event.step: event.value for event in board.Scalars(f"train/{name}")}
        assert shown[3] == pytest.approx(of_step[name])
    assert board.Scalars("train/accuracy_by_position/3")[-1].step == 4
    assert [event.step for event in board.Scalars("eval/accepted_length")] == [0, 4]


def test_a_resumed_run_replaces_what_tensorboard_showed_of_steps_that_are_done_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, loss in ((1, 2.0), (4, 1.0)):
        with MetricsLog(tmp_path, first_step) as log:
            for step in range(first_step, 7):
                log.write("train", step, loss=loss, gradient_norm=float("nan"))
        # TensorBoard reads files in the order of the second they were opened in: a resumed run is a later one.
        time.sleep(1.0 if first_step == 1 else 0.0)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    shown = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert shown == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 1.0), (5, 1.0), (6, 1.0)]
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert strict(last)["gradient_norm"] is None


@pytest.mark.parametrize(
    ("drafters", "shard"),
    [
        ([0], "ddp"),
        pytest.param([0, 1], "ddp", marks=pytest.mark.slow),
        pytest.param([1, 2], "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_the_best_drafter_is_kept_even_where_no_checkpoint_was_due(
    tiny_target_folder: Path, tmp_path: Path, drafters: list[int], shard: str
) -> None:
    recipe = tiny_recipe(
        tiny_target_folder,
        data__regenerate=True,
        data__regenerate_max_new_tokens=24,
        data__eval=["demo"],
        data__eval_rows=4,
        train__steps=60,
        train__eval_every=10,
        train__eval_max_new_tokens=24,
        train__log_every=60,
        train__checkpoint_every=7,
        train__keep_last=1,
        topology__targets=[0],
        topology__drafters=drafters,
        train__shard=shard,
    )
    job = run(tmp_path, recipe)
    assert set(job.wait()) == {0}, job.output()
    accepted = {line["step"]: line["accepted_length"] for line in job.lines("eval")}
    steps = sorted(accepted)
    improved = [step for step in steps[1:] if accepted[step] > max(accepted[s] for s in steps if s < step)]
    assert improved, "the run learned, or this test tells nothing"
    for step in improved:
        assert f"checkpoint: checkpoints/step-{step:06d}" in job.output()
    # Of equals the latest is kept, if a checkpoint was due there.
    best = max(set(improved) | {60}, key=lambda step: (accepted[step], step))
    kept = {path.name: path for path in (tmp_path / "checkpoints").glob("step-*")}
    assert set(kept) == {f"step-{best:06d}", "step-000060"}
    folder = kept[f"step-{best:06d}"]
    open_sealed(folder)
    state = json.loads((folder / "state.json").read_text())
    assert state["accepted"] == state["best_accepted"] == accepted[best]
    assert state["tokens"] == best * len(drafters) * 2 * 128, "counted up to this very step"
    card = (folder / "drafter" / CARD_FILE).read_text()
    assert f"| held_out_accepted_length | {accepted[best]:.6g} |" in card
    assert "| optim.lr | 0.01 |" in card
    assert "| answers_regenerated | True |" in card


def test_a_run_goes_on_over_another_number_of_ranks(tiny_target_folder: Path, tmp_path: Path) -> None:
    """What counts is how many micro-batches a step has, not which drafter takes them."""
    two = {"topology__targets": [0], "topology__drafters": [0, 1], "train__checkpoint_every": 3}
    first = run(tmp_path / "runs" / "a", tiny_recipe(tiny_target_folder, **two))
    assert first.wait() == [0, 0], first.output()
    shutil.rmtree(tmp_path / "runs" / "a" / "checkpoints" / "step-000006")
    alone = tiny_recipe(tiny_target_folder, train__accumulation=2)
    second = run(tmp_path / "runs" / "b", alone, resume_from="../a")
    assert second.wait() == [0], second.output()
    expected = {step: pytest.approx(first.losses()[step], rel=1e-4) for step in (4, 5, 6)}
    assert second.losses() == expected


def test_a_stop_during_an_evaluation_is_quick_and_measures_nothing(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(
        tiny_target_folder,
        data__eval=["demo"],
        data__eval_rows=400,
        train__steps=50,
        train__eval_max_new_tokens=100,
    )
    with started(tmp_path, recipe) as job:
        deadline = time.monotonic() + 60
        while "supervised" not in job.output() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1.0)
        job.kill(signal.SIGTERM)
        assert job.wait(20) == [143], job.output()
    assert job.lines("eval") == []
    assert job.lines("end")[0]["outcome"] == "stopped"
