"""What the desk makes of a run's checkpoints: what can be gone on from, and what `status` shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent import Agent
from orchestrator.container import Container
from orchestrator.errors import RefusedError, UsageError
from orchestrator.localnode.node import NodeInfo
from orchestrator.logs import show_logs
from orchestrator.records import new_run_id
from orchestrator.status import newest_with_a_checkpoint, show_status, status
from orchestrator.train import prepare
from payload.recipe import load_recipe
from tests.orchestrator.test_cli import orchestrator
from tests.orchestrator.test_job_steps import QUIET, agent, records_of_their_own
from tests.program_runs import spec

__all__ = ["agent", "records_of_their_own"]

PLACE = ("--host", "local", "--ct", "200")


def ended_run(agent: Agent, *, steps: tuple[int, ...] = (), program: str = "", **changes: Any) -> str:
    """A run that is over and has checkpoints of these steps, as far as their manifests tell."""
    run_id = new_run_id()
    agent.call("start", {"run_id": run_id, "spec": spec(run_id, program, **changes)})
    show_logs(agent, lambda data: None, run_id=run_id, follow=True)
    for step in steps:
        folder = Path(agent.container.settings.root) / f"runs/{run_id}/checkpoints/step-{step:06d}"
        folder.mkdir()
        (folder / "manifest.json").touch()
    return run_id


@pytest.mark.parametrize(
    ("steps", "changes", "message", "hint"),
    [
        ((), {}, "has no checkpoint", "make train RECIPE="),
        (
            (),
            {"resume_from": "../20260101-000000-abcdef"},
            "has no checkpoint",
            "RESUME=20260101-000000-abcdef",
        ),
        ((100, 300), {}, "has done all its 300 steps", "SET='train.from_pretrained=runs/{run_id}'"),
    ],
)
def test_a_run_that_cannot_be_gone_on_from_is_refused_before_anything_is_built(
    container: Container,
    agent: Agent,
    steps: tuple[int, ...],
    changes: dict[str, Any],
    message: str,
    hint: str,
) -> None:
    recipe = load_recipe("tiny-cpu")
    run_id = ended_run(agent, steps=steps, recipe=recipe.to_dict(), **changes)
    with pytest.raises(RefusedError, match=message) as raised:
        prepare(container, recipe, QUIET, resume=run_id)
    assert raised.value.exit_status == 4
    assert hint.format(run_id=run_id) in raised.value.hint
    assert "HOST=local CT=200" in raised.value.hint


def test_status_shows_each_runs_recipe_held_out_length_and_newest_checkpoint(
    agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "open('metrics.jsonl', 'w').write('{\"step\": 120, \"accepted_length\": 2.5}\\n')"
    run_id = ended_run(agent, steps=(100,), program=program, recipe={"name": "mine"})
    show_status(QUIET, status(agent, run_id), "")
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    heads, row = (line for line in lines if line[0] in ("run", run_id))
    shown = dict(zip(heads, row, strict=True))
    assert (shown["recipe"], shown["accepted"], shown["checkpoint"]) == ("mine", "2.50", "100")


def test_where_no_run_is_named_the_newest_with_a_whole_checkpoint_is_meant(agent: Agent) -> None:
    first = ended_run(agent, steps=(100,))
    newest = ended_run(agent)
    runs = status(agent)["runs"]
    assert newest_with_a_checkpoint(agent, runs) == first
    with pytest.raises(UsageError, match=f"no run has a whole checkpoint yet, the newest, {newest}"):
        newest_with_a_checkpoint(agent, runs[:1])


def test_a_fetch_of_the_newest_run_says_when_only_an_earlier_one_has_a_checkpoint(
    agent: Agent, local_node: NodeInfo, tmp_path: Path
) -> None:
    first = ended_run(agent, steps=(100,))
    newest = ended_run(agent)
    fetched = orchestrator("fetch", *PLACE, "--to", str(tmp_path), inventory=local_node.inventory)
    assert f"files in {tmp_path}/{newest}" in fetched.stderr
    assert (
        f"run {newest}, the newest, has no checkpoint; the newest that has one: RUN_ID={first}"
        in fetched.stderr
    )


def test_prune_shows_the_runs_that_would_go_and_removes_them_when_told_to(
    agent: Agent, local_node: NodeInfo
) -> None:
    first = ended_run(agent)
    newest = ended_run(agent, resume_from=f"../{first}")
    runs = Path(agent.container.settings.root) / "runs"
    arguments = ("prune", *PLACE, "--keep", "99")
    shown = orchestrator(*arguments, "--keep-runs", "0", inventory=local_node.inventory)
    assert shown.returncode == 0, shown.stderr
    assert f"{newest}\tfinished" in shown.stdout
    assert "nowhere by this desk" in shown.stdout
    assert "APPLY=1" in shown.stderr
    assert (runs / first).is_dir()
    refused = orchestrator(*arguments, "--run", first, "--apply", inventory=local_node.inventory)
    assert refused.returncode == 4
    assert f"run {newest} went on from its checkpoint" in refused.stderr
    gone = orchestrator(
        *arguments, "--run", newest, "--run", first, "--apply", inventory=local_node.inventory
    )
    assert gone.returncode == 0, gone.stderr
    assert "removed 2 runs (" in gone.stderr
    assert not (runs / first).exists()
    assert not (runs / newest).exists()
    both = orchestrator(*arguments, "--run", first, "--keep-runs", "1", inventory=local_node.inventory)
    assert both.returncode == 2


def test_prune_shows_the_data_that_would_go_and_removes_them_when_told_to(
    agent: Agent, local_node: NodeInfo
) -> None:
    root = Path(agent.container.settings.root)
    used, unused = root / "features" / ("a" * 16), root / "packed" / ("b" * 16)
    for folder in (used, unused):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("x" * 2000)
    run_id = ended_run(agent)
    (root / "runs" / run_id / "data.json").write_text(
        json.dumps({"names": {"features": used.name}, "complete": True})
    )
    arguments = ("prune", *PLACE, "--keep", "99", "--data")
    shown = orchestrator(*arguments, "all", inventory=local_node.inventory)
    assert shown.returncode == 0, shown.stderr
    assert f"features/{used.name}\t2 KiB\t{run_id}" in shown.stdout
    assert f"packed/{unused.name}\t2 KiB\tnone that is left" in shown.stdout
    assert "would remove 2 data sets (4 KiB)" in shown.stderr
    assert used.is_dir()
    (root / "runs" / run_id / "state.json").write_text(
        (root / "runs" / run_id / "state.json").read_text().replace('"finished"', '"failed"')
    )
    stays = orchestrator(*arguments, "features", inventory=local_node.inventory)
    assert f"features/{used.name} stays: run {run_id} (failed)" in stays.stderr
    together = orchestrator(*arguments, "features", "--run", run_id, inventory=local_node.inventory)
    assert "stays" not in together.stderr
    assert "would remove 1 run (" in together.stderr
    assert "and 1 data set (2 KiB); nothing was" in together.stderr
    gone = orchestrator(*arguments, "packed", "--apply", inventory=local_node.inventory)
    assert gone.returncode == 0, gone.stderr
    assert "removed 1 data set (2 KiB)" in gone.stderr
    assert (used.is_dir(), unused.exists()) == (True, False)
    wrong = orchestrator(*arguments, "runs", inventory=local_node.inventory)
    assert wrong.returncode == 2
    assert "answers, packed, features or all" in wrong.stderr
