"""A container that answers as it likes names no file at the desk: not by a run's id, a cache's or a file's name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent import Agent
from orchestrator.answers import NotUnderstood
from orchestrator.connection import Connection
from orchestrator.console import Console
from orchestrator.container import Container
from orchestrator.errors import OrchestratorError, RemoteError, UsageError
from orchestrator.evaluate import Question, evaluate
from orchestrator.fetch import fetch
from orchestrator.inventory import Destination
from orchestrator.prune import remove_runs
from orchestrator.status import newest_run, show_status, status
from orchestrator.warmup import kept_artifact, warm_up
from payload.recipe import load_recipe

QUIET = Console(quiet=True)
PLANTED = b"planted"
RUN = "20260101-000000-abcdef"
EVALUATION = {
    "accepted_length": 1.5,
    "accepted_by_position": [0.5],
    "prompts": 1,
    "tokens": 3,
    "speedup": None,
    "identical": 1,
    "drafter": f"runs/{RUN}",
    "temperature": 0,
}
# Answers each verb as answers.json beside it says, and notes which verbs were asked.
AGENT = """#!/usr/bin/env python3
import json, pathlib, sys
here = pathlib.Path(__file__).parent
nonce = json.loads(sys.stdin.readline())["nonce"]
with open(here / "asked", "a") as asked:
    print(sys.argv[-1], file=asked)
answers = json.loads((here / "answers.json").read_text())
print(json.dumps({"nonce": nonce, "result": answers[sys.argv[-1]]}))
"""

Hostile = Callable[..., Agent]

OUTSIDE = [
    "../../victim/.ssh",
    "/etc",
    "..",
    ".",
    "",
    "a/b",
    "a\0b",
    "a\n",
    "\ud800",
    ".hidden",
    "x" * 200,
    7,
    None,
]


@pytest.fixture
def hostile(connection: Connection, destination: Destination, tmp_path: Path) -> Hostile:
    """An agent that answers each verb with what is given for it."""

    def answering(**answers: object) -> Agent:
        home = tmp_path / "hostile"
        home.mkdir(exist_ok=True)
        (home / "answers.json").write_text(json.dumps(answers))
        python = home / "python"
        python.write_text(AGENT)
        python.chmod(0o755)
        settings = dataclasses.replace(destination.container, python=str(python))
        return Agent.current(Container(connection, dataclasses.replace(destination, container=settings)))

    return answering


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the desk keeps what is its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "desk" / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "desk" / "cache"))
    return tmp_path / "desk"


def asked(tmp_path: Path) -> list[str]:
    return (tmp_path / "hostile" / "asked").read_text().split()


def everything_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "hostile" not in path.parts}


def planted_file(agent: Agent, path: str) -> dict[str, Any]:
    """What a listing says of a file that the container really has, wherever the run is said to be."""
    return {"path": path, "size": len(PLANTED), "sha256": hashlib.sha256(PLANTED).hexdigest()}


@pytest.mark.parametrize("run_id", OUTSIDE)
def test_a_run_id_that_is_none_is_refused_where_it_comes_in(hostile: Hostile, run_id: object) -> None:
    agent = hostile(status={"runs": [{"run_id": run_id, "state": "finished"}]})
    for ask in (status, newest_run):
        with pytest.raises(NotUnderstood, match=r"runs\[0\].run_id is "):
            ask(agent)


@pytest.mark.parametrize("runs", [7, None, "abc", [7], {"run_id": RUN}, [{}], [{"state": "finished"}]])
def test_runs_that_are_none_are_an_error_in_words(hostile: Hostile, runs: object) -> None:
    with pytest.raises(NotUnderstood, match=r"runs(\[0\])?(.run_id)? is "):
        newest_run(hostile(status={"runs": runs}))


def test_a_fetch_of_the_newest_run_writes_nothing_outside_its_folder(
    hostile: Hostile, container: Container, desk: Path, tmp_path: Path
) -> None:
    runs = Path(container.settings.root) / "runs"
    outside = tmp_path / "victim" / ".ssh"
    to = tmp_path / "home" / "runs"
    run_id = f"../../{outside.relative_to(tmp_path)}"
    (runs / run_id).mkdir(parents=True)
    (runs / run_id / "authorized_keys").write_bytes(PLANTED)
    agent = hostile(
        status={"runs": [{"run_id": run_id, "state": "finished"}]},
        files={"files": [planted_file(container, "authorized_keys")]},
    )
    before = everything_below(tmp_path)
    with pytest.raises(RemoteError), QUIET.step("fetch") as report:
        fetch(container, agent, newest_run(agent), to, report)
    with pytest.raises(UsageError, match="not a run id"), QUIET.step("fetch") as report:
        fetch(container, agent, run_id, to, report)
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", "a\0b", "\ud800", ".."])
def test_a_fetch_writes_no_file_that_is_listed_outside_the_run(
    hostile: Hostile, container: Container, tmp_path: Path, path: str
) -> None:
    agent = hostile(files={"files": [planted_file(container, path)]})
    with pytest.raises(RemoteError, match="is no path of a file in the run"), QUIET.step("fetch") as report:
        fetch(container, agent, RUN, tmp_path / "to", report)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("fingerprint", [*OUTSIDE, "0123456789abcdeF", "0123456789abcde"])
def test_a_compile_cache_that_is_told_is_neither_read_nor_written_elsewhere_at_the_desk(
    hostile: Hostile, desk: Path, tmp_path: Path, fingerprint: object
) -> None:
    if isinstance(fingerprint, str) and "\0" not in fingerprint and fingerprint.isascii():
        secret = kept_artifact(fingerprint[:100])
        secret.parent.mkdir(parents=True, exist_ok=True)
        secret.write_bytes(b"the desk's own")
    before = everything_below(tmp_path)
    artifact = {"path": "x", "bytes": len(PLANTED), "sha256": hashlib.sha256(PLANTED).hexdigest()}
    for warm in (False, True):
        answer = {"compiled": True, "warm": warm, "fingerprint": fingerprint, "artifact": artifact}
        agent = hostile(call=answer)
        with pytest.raises(RemoteError, match="fingerprint is "), QUIET.step("warmup") as report:
            warm_up(agent, report, release="0" * 16, venv="0" * 16, recipe=load_recipe("tiny-cpu"))
    assert everything_below(tmp_path) == before
    assert set(asked(tmp_path)) == {"call"}


@pytest.mark.parametrize("odd", ["x", [], {"loss": "x"}, True, 1e999, -1e999, float("nan"), 10**400])
def test_odd_values_among_metrics_which_the_job_wrote_are_no_fault_of_the_answer(
    hostile: Hostile, odd: object, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = dict.fromkeys(("step", "loss", "accepted_length", "tokens_per_s"), odd)
    runs = [{"run_id": RUN, "state": "finished", "last_metrics": metrics}]
    show_status(QUIET, status(hostile(status={"runs": runs})), "")
    assert capsys.readouterr().out.count(RUN) == len(runs)


@pytest.mark.parametrize(
    "answer",
    [
        {"runs": [{"run_id": "../..", "state": "finished", "bytes": 1}], "kept": {}},
        {"runs": [{"run_id": RUN, "state": "finished", "bytes": "much"}], "kept": {}},
        {"runs": [{"run_id": RUN, "state": "finished", "bytes": 10**400}], "kept": {}},
        {"runs": [7], "kept": {}},
        {"runs": [], "kept": []},
    ],
)
def test_what_is_told_of_removed_runs_is_looked_at(hostile: Hostile, answer: dict[str, Any]) -> None:
    agent = hostile(remove_runs={**answer, "applied": True})
    with pytest.raises(RemoteError), QUIET.step("prune") as report:
        remove_runs(agent, report, keep=1, run_ids=None, apply=True)


def test_the_newest_run_is_the_one_that_the_agent_tells_first(hostile: Hostile) -> None:
    """Its own clock made the order; an id is the clock of the desk that started the run."""
    runs = [
        {"run_id": "20200101-000000-abcdef", "state": "finished"},
        {"run_id": "20200101-000000-fedcba", "state": "running"},
        {"run_id": "20990101-000000-abcdef", "state": "finished"},
        {"run_id": "20990101-000000-fedcba", "state": "running"},
    ]
    agent = hostile(status={"runs": runs})
    assert newest_run(agent) == "20200101-000000-abcdef"
    assert newest_run(agent, active=True) == "20200101-000000-fedcba"


def test_an_evaluation_of_the_newest_run_asks_once_for_the_runs(hostile: Hostile, tmp_path: Path) -> None:
    agent = hostile(
        status={"runs": [{"run_id": RUN, "state": "finished", "checkpoints": [100]}]},
        call=EVALUATION,
    )
    with QUIET.step("evaluate") as report:
        assert evaluate(agent, Question(), report) == EVALUATION
    assert asked(tmp_path) == ["status", "call"]


@pytest.mark.parametrize(
    "deep", [b"[" * 200_000, b'{"nonce": ' * 100_000, b'{"a":' * 200_000 + b"1" + b"}" * 200_000]
)
def test_a_line_that_nests_without_end_is_no_answer(hostile: Hostile, tmp_path: Path, deep: bytes) -> None:
    agent = hostile()
    (tmp_path / "hostile" / "deep").write_bytes(deep + b"\n")
    (tmp_path / "hostile" / "python").write_text(f"#!/bin/sh\ncat {tmp_path}/hostile/deep\n")
    with pytest.raises(OrchestratorError, match="gave no answer"):
        status(agent)
