"""Checkpoints are written one at a time while training goes on, and what goes wrong with one is told."""

from __future__ import annotations

import threading

import pytest
import torch

from payload.trainer.checkpoint import Progress, Snapshot
from payload.trainer.checkpoint_writer import CheckpointWriter

SOON = 10.0


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it() -> None:
    writer, may_end, order = CheckpointWriter(), threading.Event(), list[str]()

    def first() -> None:
        assert may_end.wait(SOON)
        order.append("first")

    writer.begin(first)
    order.append("a step of training")
    threading.Timer(0.1, may_end.set).start()
    writer.begin(lambda: order.append("second"))
    assert order[:2] == ["a step of training", "first"]
    writer.finish()
    assert order == ["a step of training", "first", "second"]


@pytest.mark.parametrize("then", ["begin", "finish"])
def test_a_write_that_failed_is_told_by_the_next_call(then: str) -> None:
    def fails() -> None:
        raise OSError("No space left on device")

    writer, written = CheckpointWriter(), list[int]()
    writer.begin(fails)
    with pytest.raises(OSError, match="No space left"):
        writer.begin(lambda: written.append(1)) if then == "begin" else writer.finish()
    writer.begin(lambda: written.append(2))
    writer.finish()
    assert written == [2], "told once, and in the way of nothing afterwards"


def test_what_is_being_written_is_waited_for_but_not_told_where_something_worse_is() -> None:
    writer, may_end, done = CheckpointWriter(), threading.Event(), list[int]()

    def write() -> None:
        assert may_end.wait(SOON)
        done.append(1)
        raise OSError("No space left on device")

    writer.begin(write)
    threading.Timer(0.05, may_end.set).start()
    writer.settle()
    assert done == [1]


def test_a_snapshot_that_was_copied_does_not_follow_the_training() -> None:
    weight, moment = torch.ones(4), torch.zeros(4)
    copied = Snapshot(Progress(1, "id"), {"w": weight}, {"m": moment}).copied()
    weight.add_(1)
    moment.add_(1)
    assert copied.weights["w"].tolist() == [1.0] * 4
    assert copied.optimizer["m"].tolist() == [0.0] * 4
