"""Steps that become slow are an alarm, once, with what they wait for; a slow moment is none."""

from __future__ import annotations

import pytest
import torch

from payload.trainer.metrics import Totals
from payload.trainer.reporting import Interval, Speed

NOTHING = Totals(0.0, 0.0, 0, 0, (), (), ())


def interval(seconds: float, transfer_wait_s: float = 0.0, data_wait_s: float = 0.0) -> Interval:
    return Interval(NOTHING, seconds, torch.empty(0), transfer_wait_s, data_wait_s)


def lines(*seconds: float, steps: int = 10) -> list[str | None]:
    speed = Speed()
    return [speed.after(steps, interval(each)) for each in seconds]


def test_a_slow_run_is_an_alarm_once_and_its_end_is_told() -> None:
    found = lines(5, 6, 21, 22, 23, 24, 6, 5, 21, 21)
    assert found[:3] == [None] * 3, "a slow moment is none"
    assert found[3] == (
        "ALARM: steps take 2.20 s, 4 x as long as this run's fastest. Something else may use the GPUs or the cores, "
        "or they are throttled: make doctor, nvidia-smi -q."
    )
    assert found[4:6] == [None, None]
    assert found[6] == "steps take 0.60 s again"
    assert found[7:9] == [None, None]
    assert found[9] is not None
    assert found[9].startswith("ALARM: steps take 2.10 s")


def test_steps_of_milliseconds_that_vary_are_no_alarm() -> None:
    assert not any(lines(0.005, 0.05, 0.2, 0.005, 0.04, steps=1))


def test_a_run_that_grows_faster_was_not_slow_before() -> None:
    assert not any(lines(40, 40, 40, 9, 9, 9))


@pytest.mark.parametrize(
    ("waits", "why"),
    [
        ({"transfer_wait_s": 100.0 + 30.0}, "wait for features"),
        ({"data_wait_s": 7.0 + 30.0}, "wait for rows or stored features"),
    ],
)
def test_what_they_wait_for_is_named_by_this_intervals_own_waits(waits: dict[str, float], why: str) -> None:
    speed = Speed()
    assert speed.after(10, interval(5, transfer_wait_s=100.0, data_wait_s=7.0)) is None
    found = speed.after(10, interval(40, **{"transfer_wait_s": 100.0, "data_wait_s": 7.0} | waits))
    assert found is not None
    assert why in found
