"""Runs are removed when they are asked for, wholly, and never one that is going on or that another needs."""

from __future__ import annotations

from typing import Any

import pytest

from payload.agent.usage import using
from tests.payload.agent.container import FakeContainer


def ended(container: FakeContainer, *run_ids: str, **changes: Any) -> None:
    for run_id in run_ids:
        container.start(run_id, "print('x' * 1000)", **changes)
        container.wait_for_state(run_id, "finished")


def removed(container: FakeContainer, **fields: Any) -> list[str]:
    return [run["run_id"] for run in container.result("remove_runs", **fields)["runs"]]


def left(container: FakeContainer) -> list[str]:
    return sorted(path.name for path in (container.root / "runs").iterdir())


def test_all_but_the_newest_are_shown_and_with_apply_removed_wholly(container: FakeContainer) -> None:
    ended(container, "r1", "r2", "r3")
    (container.root / "runs/.r0.half").mkdir()
    shown = container.result("remove_runs", keep=1)
    assert [(run["run_id"], run["state"]) for run in shown["runs"]] == [
        ("r1", "finished"),
        ("r2", "finished"),
    ]
    assert all(run["bytes"] > 1000 for run in shown["runs"])
    assert (shown["kept"], shown["applied"]) == ({}, False)
    assert left(container) == [".r0.half", "r1", "r2", "r3"]
    assert removed(container, keep=1, apply=True) == ["r1", "r2"]
    assert left(container) == ["r3"]
    assert removed(container, keep=1, apply=True) == []
    assert removed(container, keep=9, apply=True) == []
    assert removed(container, run_ids=["r3"], apply=True) == ["r3"]
    assert left(container) == []


def test_what_a_run_pinned_is_free_once_it_is_gone(container: FakeContainer) -> None:
    venv = container.root / "venvs" / ("1" * 16)
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(container.python)
    ended(container, "r1", venv=venv.name)
    assert container.result("prune", keep=0) == {"removed": []}
    removed(container, keep=0, apply=True)
    assert container.result("prune", keep=0) == {"removed": [f"venvs/{venv.name}"]}


def test_a_run_that_is_going_on_stays_and_what_it_went_on_from_or_begins_with_too(
    container: FakeContainer,
) -> None:
    ended(container, "r1", "r2", "r4")
    recipe = {"train": {"from_pretrained": "runs/r2"}}
    container.start("r3", "import time; time.sleep(60)", resume_from="../r1", recipe=recipe)
    kept = container.result("remove_runs", keep=0)["kept"]
    assert kept == {
        "r1": "run r3 went on from its checkpoint",
        "r2": "run r3 begins with its drafter",
        "r3": "it is running",
    }
    assert removed(container, keep=0, apply=True) == ["r4"]
    assert left(container) == ["r1", "r2", "r3"]
    container.result("stop", run_id="r3", grace_s=0)


def test_a_chain_of_resumes_goes_as_a_whole_or_stays_as_a_whole(container: FakeContainer) -> None:
    ended(container, "r1")
    ended(container, "r2", resume_from="../r1")
    ended(container, "r3", resume_from="../r2")
    assert removed(container, keep=1, apply=True) == []
    error = container.error("remove_runs", run_ids=["r1"], apply=True)
    assert (error["kind"], error["message"]) == (
        "refused",
        "run r1 stays: run r2 went on from its checkpoint",
    )
    assert removed(container, run_ids=["r2", "r3", "r1"], apply=True) == ["r1", "r2", "r3"]


def test_a_run_that_is_being_read_stays(container: FakeContainer) -> None:
    ended(container, "r1")
    with using(container.root / "runs/r1"):
        assert container.result("remove_runs", keep=0, apply=True)["kept"] == {"r1": "it is being read"}
    assert removed(container, keep=0, apply=True) == ["r1"]


def test_nothing_is_removed_while_a_run_that_stays_cannot_tell_what_it_needs(
    container: FakeContainer,
) -> None:
    ended(container, "r1", "r2")
    (container.root / "runs/r2/spec.json").write_text("{")
    assert "spec.json is damaged" in container.error("remove_runs", keep=1, apply=True)["message"]
    assert left(container) == ["r1", "r2"]


@pytest.mark.parametrize("fields", [{}, {"keep": -1}, {"keep": 1, "run_ids": ["r1"]}, {"run_ids": ["r9"]}])
def test_a_request_that_names_no_run_is_a_usage_error(
    container: FakeContainer, fields: dict[str, Any]
) -> None:
    ended(container, "r1")
    assert container.error("remove_runs", apply=True, **fields)["kind"] == "usage"
    assert left(container) == ["r1"]
