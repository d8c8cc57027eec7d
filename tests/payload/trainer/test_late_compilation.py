"""Something compiles after the first step: an error by default, an alarm and a count when the recipe allows it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from payload.compile.guard import remove
from payload.trainer import drafter_side
from payload.trainer.job import run_job
from payload.trainer.schedule import learning_rate
from tests.payload.trainer.jobs import tiny_recipe


@pytest.fixture
def a_step_that_compiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The third step calls a compiled function with a new shape; the first two with another one."""
    torch._dynamo.reset()
    function = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)

    def compiling(step: int, *rest: Any) -> float:
        function(torch.ones(3 if step == 3 else 2))
        return learning_rate(step, *rest)

    monkeypatch.setattr(drafter_side, "learning_rate", compiling)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    remove()


def run_here(run_dir: Path, target: Path, **overrides: Any) -> tuple[int, list[dict[str, Any]]]:
    recipe = tiny_recipe(target, train__steps=4, **overrides)
    (run_dir / "spec.json").write_text(json.dumps({"recipe": recipe.to_dict()}))
    status = run_job(run_dir / "spec.json")
    return status, [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("a_step_that_compiles")
def test_by_default_the_run_fails_and_says_why(
    tiny_target_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, lines = run_here(tmp_path, tiny_target_folder)
    assert status == 1
    assert [line["step"] for line in lines if line["event"] == "train"] == [1, 2]
    said = capfd.readouterr()
    assert "training would have compiled again after its first step" in said.out + said.err
    assert "Traceback" not in said.out + said.err


@pytest.mark.usefixtures("a_step_that_compiles")
def test_let_through_it_is_counted_and_an_alarm_is_raised_once(
    tiny_target_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, lines = run_here(tmp_path, tiny_target_folder, train__on_recompile="count")
    assert status == 0
    late = [line for line in lines if line["event"] == "compiled_late"]
    assert [(line["step"], line["compilations"], line["recompiles"]) for line in late] == [(3, 1, 1)]
    assert capfd.readouterr().out.count("ALARM: 1 frames were compiled after the first step") == 1
