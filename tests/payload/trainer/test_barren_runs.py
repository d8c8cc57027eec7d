"""A run that learns nothing says so and fails; one that misses a step says so and goes on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from payload.errors import PayloadError
from payload.trainer.metrics import MetricsLog, Totals
from payload.trainer.reporting import Interval, RunReport
from tests.payload.trainer.jobs import run, tiny_recipe
from tests.payload.trainer.test_parts import CONFIG, small_recipe

NAN = float("nan")


@pytest.mark.parametrize(
    ("spoiled", "kind"),
    [("teacher", "kl"), ("head", "ce"), pytest.param("head", "dpace", marks=pytest.mark.slow)],
)
def test_a_run_that_never_changes_a_weight_fails_with_words(
    tiny_target_folder: Path, tmp_path: Path, spoiled: str, kind: str
) -> None:
    """Its features are finite all the while."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder)
    if spoiled == "teacher":
        torch.nn.init.constant_(model.model.norm.weight, NAN)
    else:
        # A row of a token that no text has: it is in all logits, and in no feature.
        model.lm_head.weight.data[-1] = NAN
    model.save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(tiny_target_folder).save_pretrained(tmp_path / "target")
    job = run(tmp_path / "run", tiny_recipe(tmp_path / "target", train__steps=4, loss__kind=kind))
    assert job.wait() == [1], job.output()
    assert "1 of 1 steps changed no weight" in job.output()
    assert "The last 4 steps changed no weight" in job.output()
    assert [line["skipped_updates"] for line in job.lines("train")] == [1, 1, 1, 1]
    assert "Traceback" not in job.output()


def report_in(folder: Path) -> tuple[RunReport, MetricsLog]:
    run: Any = SimpleNamespace(
        recipe=small_recipe(train__steps=100),
        config=CONFIG,
        ranks=SimpleNamespace(device=torch.device("cpu")),
        roles=SimpleNamespace(drafters=(0,)),
        first_step=1,
    )
    log = MetricsLog(folder)
    return RunReport(run, log), log


def interval(norms: list[float], skipped: int = 0, weight: float = 1.0) -> Interval:
    slots = (0.0, 1.0, 1.0, 1.0)
    totals = Totals(1.0, weight, skipped, len(norms), slots, slots, slots)
    return Interval(totals, 1.0, torch.tensor(norms), 0.0, 0.0)


def test_slow_steps_are_an_alarm_in_the_log_and_in_the_metrics_but_for_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, log = report_in(tmp_path)
    with log:
        for step, seconds in ((1, 0.1), (11, 10.0), (21, 10.0), (31, 60.0)):
            report.trained(step, replace(interval([1.0] * 10), seconds=seconds), tokens_seen=1)
    told = [line for line in capsys.readouterr().out.splitlines() if "ALARM" in line]
    assert len(told) == 1
    assert told[0].startswith("ALARM: steps take 6.00 s, 6 x as long as this run's fastest")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["event"] == "speed"]
    assert [(line["step"], line["step_s"], line["fastest_step_s"]) for line in found] == [(31, 6.0, 1.0)]


def test_steps_that_were_missed_are_counted_and_no_reason_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, log = report_in(tmp_path)
    with log:
        for step in range(9, 90, 9):
            report.trained(step, interval([1.0, NAN, math.inf, *[NAN] * 5, 2.0]), tokens_seen=1)
    assert "warning: 7 of 9 steps changed no weight" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["skipped_updates"] for line in lines} == {7}


@pytest.mark.parametrize("size", [1, 4, 7, 30])
def test_ten_missed_in_a_row_end_the_run_however_often_it_reports(tmp_path: Path, size: int) -> None:
    report, log = report_in(tmp_path)
    norms = [1.0] * 7 + [NAN] * 30
    reported: list[int] = []

    def train() -> None:
        for end in range(size, len(norms) + size, size):
            report.trained(end, interval(norms[end - size : end]), tokens_seen=1)
            reported.append(end)

    with log, pytest.raises(PayloadError, match="changed no weight: their gradients were not finite"):
        train()
    assert max(reported, default=0) < 7 + 10


@pytest.mark.parametrize(
    ("skipped", "weight", "why"),
    [
        (10, 0.0, "none of their features or losses were finite"),
        (0, 0.0, "nothing in them counted"),
        (0, 1.0, "their gradients were not finite"),
    ],
)
def test_why_nothing_was_learned_is_said(tmp_path: Path, skipped: int, weight: float, why: str) -> None:
    report, log = report_in(tmp_path)
    with log, pytest.raises(PayloadError, match=why):
        report.trained(10, interval([NAN] * 10, skipped, weight), tokens_seen=1)
