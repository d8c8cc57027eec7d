"""Answers, training sets and features go when they are asked for, and never those that a run can still need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from payload.agent.run_data import note_run_data
from payload.agent.usage import using
from tests.payload.agent.container import FakeContainer

SLEEPS = "import time; time.sleep(60)"


def made(container: FakeContainer, *names: str) -> None:
    """Data as the trainer leaves them: folders, but for answers, of which each rank has a file."""
    for name in names:
        path = container.root / name
        if name.startswith("answers/"):
            path.parent.mkdir(exist_ok=True)
            for file in (path.with_suffix(".jsonl"), path.with_suffix(".1.jsonl")):
                file.write_text("x" * 100)
        else:
            path.mkdir(parents=True)
            (path / "manifest.json").write_text("x" * 100)


def uses(container: FakeContainer, run_id: str, complete: bool = True, **names: str) -> None:
    paths = {kind: Path(f"{name}.jsonl" if kind == "answers" else name) for kind, name in names.items()}
    note_run_data(container.root / "runs" / run_id, complete, **paths)


def left(container: FakeContainer) -> list[str]:
    paths = [path for kind in ("answers", "packed", "features") for path in (container.root / kind).glob("*")]
    return sorted(path.relative_to(container.root).as_posix() for path in paths)


def removed(container: FakeContainer, *kinds: str, **fields: Any) -> list[str]:
    found = container.result("remove_data", kinds=kinds, **fields)["data"]
    return [f"{one['kind']}/{one['name']}" for one in found]


def test_what_finished_runs_used_is_shown_and_with_apply_removed(container: FakeContainer) -> None:
    made(container, "answers/a1", "packed/p1", "packed/p2", "features/f1")
    (container.root / "features/.f2.half").mkdir()
    for run_id in ("r1", "r2"):
        container.start(run_id, "")
        container.wait_for_state(run_id, "finished")
        uses(container, run_id, answers="a1", packed="p1")
    before = left(container)
    found = container.result("remove_data", kinds=["answers", "packed"])
    assert found == {
        "applied": False,
        "kept": {},
        "data": [
            {"kind": "answers", "name": "a1", "bytes": 200, "runs": ["r1", "r2"]},
            {"kind": "packed", "name": "p1", "bytes": 100, "runs": ["r1", "r2"]},
            {"kind": "packed", "name": "p2", "bytes": 100, "runs": []},
        ],
    }
    assert left(container) == before
    assert removed(container, "features", apply=True) == ["features/f2", "features/f1"]
    assert left(container) == ["answers/a1.1.jsonl", "answers/a1.jsonl", "packed/p1", "packed/p2"]
    assert container.result("remove_data", kinds=["packed"], apply=True)["data"][0]["bytes"] == 100
    assert removed(container, "answers", "packed", "features", apply=True) == ["answers/a1"]
    assert left(container) == []


def test_what_a_run_uses_that_goes_on_or_can_be_resumed_stays(container: FakeContainer) -> None:
    made(container, "packed/p1", "packed/p2", "packed/p3", "answers/a1")
    container.start("r1", "raise SystemExit(1)")
    container.wait_for_state("r1", "failed")
    uses(container, "r1", complete=False, answers="a1")
    container.start("r2", SLEEPS)
    uses(container, "r2", packed="p2")
    found = container.result("remove_data", kinds=["packed", "answers"], apply=True)
    assert found["kept"] == {
        "packed/p2": "run r2 is running",
        "answers/a1": (
            "run r1 (failed) left it, and the next on the same data goes on with it; make prune RUN_ID=r1 lets it go"
        ),
    }
    assert left(container) == ["answers/a1.1.jsonl", "answers/a1.jsonl", "packed/p2"]
    container.result("stop", run_id="r2", grace_s=0)
    without = container.result("remove_data", kinds=["packed", "answers"], gone=["r1"])
    assert [one["name"] for one in without["data"]] == ["a1"]
    assert without["kept"].keys() == {"packed/p2"}
    container.result("remove_runs", keep=0, apply=True)
    assert removed(container, "packed", "answers", apply=True) == ["packed/p2", "answers/a1"]


def test_nothing_goes_while_a_run_prepares_its_data(container: FakeContainer) -> None:
    made(container, "packed/p1")
    container.start("r1", SLEEPS)
    error = container.error("remove_data", kinds=["packed"], apply=True)
    assert (error["kind"], error["message"]) == ("busy", "run r1 is preparing its data")
    assert left(container) == ["packed/p1"]
    container.result("stop", run_id="r1", grace_s=0)


def test_nothing_goes_while_a_run_that_can_be_resumed_does_not_say_what_it_uses(
    container: FakeContainer,
) -> None:
    made(container, "packed/p1")
    container.start("r1", "raise SystemExit(1)")
    container.wait_for_state("r1", "failed")
    checkpoint = container.root / "runs/r1/checkpoints/step-000005"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    error = container.error("remove_data", kinds=["packed"], apply=True)
    assert error["kind"] == "refused"
    assert "run r1 (failed) can be resumed" in error["message"]
    uses(container, "r1", packed="p1")
    found = container.result("remove_data", kinds=["packed"], apply=True)
    assert found["data"] == []
    assert found["kept"] == {
        "packed/p1": "run r1 (failed) can be resumed; make prune RUN_ID=r1 lets it go",
    }
    noted = container.root / "runs/r1/data.json"
    for damage in ("{", "[]", '{"names": 3, "complete": true}'):
        noted.write_text(damage)
        assert str(noted) in container.error("remove_data", kinds=["packed"], apply=True)["message"]
    assert left(container) == ["packed/p1"]
    container.result("remove_runs", keep=0, apply=True)
    assert removed(container, "packed", apply=True) == ["packed/p1"]


def test_what_a_run_used_that_failed_after_its_last_step_is_free(container: FakeContainer) -> None:
    made(container, "packed/p1", "packed/p2")
    for run_id, steps in (("r1", 5), ("r2", 6)):
        container.start(run_id, "raise SystemExit(1)", recipe={"train": {"steps": steps}})
        container.wait_for_state(run_id, "failed")
        checkpoint = container.root / "runs" / run_id / "checkpoints/step-000005"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
        uses(container, run_id, packed=f"p{run_id[1]}")
    assert removed(container, "packed", apply=True) == ["packed/p1"]


def test_what_somebody_reads_stays(container: FakeContainer) -> None:
    made(container, "features/f1")
    with using(container.root / "features/f1"):
        assert removed(container, "features", apply=True) == []
    assert left(container) == ["features/f1"]


@pytest.mark.parametrize("kinds", [[], ["runs"], ["packed", "../x"], [3]])
def test_other_kinds_are_refused(container: FakeContainer, kinds: list[Any]) -> None:
    assert container.error("remove_data", kinds=kinds)["kind"] == "usage"
