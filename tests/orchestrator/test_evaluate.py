"""Evaluating a drafter from the desk: a tiny untrained target and drafter in the embedded node's container."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent import Agent
from orchestrator.console import Console
from orchestrator.container import Container
from orchestrator.deploy import PAYLOAD, deploy
from orchestrator.errors import RefusedError
from orchestrator.evaluate import Question, evaluate
from orchestrator.localnode.node import NodeInfo
from orchestrator.records import new_run_id
from orchestrator.status import status, stop
from payload.agent.release import tree_hash
from payload.drafter.checkpoint import save_drafter
from payload.drafter.model import DFlashDrafter
from payload.recipe import load_recipe
from payload.target import Target
from payload.trainer.program import drafter_config_for
from tests.payload.trainer.jobs import save_tiny_target, tiny_recipe

QUIET = Console(quiet=True)
VENV = "fedcba9876543210"


@pytest.fixture
def agent(container: Container) -> Iterator[Agent]:
    """The deployed release's agent; the venv in use is the one that runs these tests."""
    with QUIET.step("deploy") as report:
        deployed = deploy(container, report)
    root = Path(container.settings.root)
    venv = root / "venvs" / VENV
    venv.mkdir(parents=True)
    for part in Path(sys.prefix).iterdir():
        (venv / part.name).symlink_to(part)
    (root / "venv").symlink_to(f"venvs/{VENV}")
    agent = Agent.of_release(container, deployed.release)
    try:
        yield agent
    finally:
        for run in status(agent)["runs"]:
            if run["state"] in ("starting", "running", "stopping"):
                with QUIET.step("stop") as report:
                    stop(agent, run["run_id"], report, grace_s=1.0)
        (root / "venv").unlink()
        shutil.rmtree(venv)


def start(agent: Agent, program: str, recipe: dict[str, Any]) -> str:
    run_id = new_run_id()
    spec = {
        "run_id": run_id,
        "release": tree_hash(PAYLOAD),
        "venv": VENV,
        "cache": None,
        "command": ["-I", "-c", program],
        "env": {},
        "recipe": recipe,
        "nproc": 1,
        "created_at": time.time(),
    }
    agent.call("start", {"run_id": run_id, "spec": spec})
    return run_id


def run_with_a_checkpoint(agent: Agent, folder: Path) -> str:
    """A run that is over and left a drafter of a tiny target, as the trainer leaves it."""
    from payload.data.sealed import sealed_folder
    from payload.data.tokens import load_tokenizer

    recipe = tiny_recipe(save_tiny_target(folder / "target"), data__eval=["demo"], data__eval_rows=5)
    run_id = start(agent, "print('done')", recipe.to_dict())
    target = Target.load(recipe.target)
    config = drafter_config_for(recipe, target.config, load_tokenizer(recipe.target).mask_token_id)
    checkpoints = Path(agent.container.settings.root) / "runs" / run_id / "checkpoints"
    with sealed_folder(checkpoints / "step-000001") as partial:
        (partial / "state.json").write_text(json.dumps({"step": 1, "identity": "", "accepted": 1.5}))
        save_drafter(partial / "drafter", DFlashDrafter(config), config)
    return run_id


def orchestrator(node: NodeInfo, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", *arguments, "--host", "local", "--ct", "200"],
        env={**os.environ, "DFLASH_INVENTORY": str(node.inventory)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_run_is_evaluated_with_its_own_recipe_and_shown_as_tables(
    agent: Agent, local_node: NodeInfo, folder: Path
) -> None:
    run_id = run_with_a_checkpoint(agent, folder)
    changes = ("--set", "data.eval_rows=3", "--max-new-tokens", "6", "--checkpoint", "best")
    shown = orchestrator(local_node, "evaluate", run_id, *changes)
    assert shown.returncode == 0, shown.stderr
    rows = dict(line.split("\t") for line in shown.stdout.splitlines())
    assert 1.0 <= float(rows["accepted length (tokens per target forward)"]) <= 4.0
    assert rows["texts identical to the target's own"] == "3 of 3"
    assert (rows["prompts"], rows["tokens"]) == ("3", "18")
    assert rows["drafter"].endswith(f"runs/{run_id}/checkpoints/step-000001/drafter")
    assert rows["1"].endswith(" %")
    assert "✓ evaluate" in shown.stderr


def test_an_evaluation_is_refused_while_a_job_holds_the_gpus_unless_told_to(agent: Agent) -> None:
    run_id = start(agent, "import time; time.sleep(60)", {})
    with pytest.raises(RefusedError, match=run_id) as raised, QUIET.step("evaluate") as report:
        evaluate(agent, Question(f"runs/{run_id}"), report)
    assert f"make logs RUN_ID={run_id}" in raised.value.hint
    assert "BESIDE=1" in raised.value.hint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("../elsewhere",), "not a run id"),
        (("--drafter", "/models/drafter"), "RECIPE="),
    ],
)
def test_what_cannot_be_evaluated_is_said_in_words(
    agent: Agent, local_node: NodeInfo, arguments: tuple[str, ...], words: str
) -> None:
    shown = orchestrator(local_node, "evaluate", *arguments)
    assert shown.returncode == 2, shown.stderr
    assert words in shown.stderr
    assert "Traceback" not in shown.stderr


BAD_RECIPES = [
    (("--recipe", "no-such"), "No recipe no-such"),
    (("--recipe", "tiny-cpu", "--set", "data.eval_rows=x"), "data.eval_rows: "),
    (("--set", "data.eval_rows"), "not of the form key=value"),
]


@pytest.mark.parametrize("command", ["evaluate", "estimate"])
@pytest.mark.parametrize(("arguments", "words"), BAD_RECIPES)
def test_a_recipe_that_is_none_is_refused_before_anything_is_brought_there(
    container: Container, local_node: NodeInfo, command: str, arguments: tuple[str, ...], words: str
) -> None:
    current = Path(container.settings.root) / "current"
    current.unlink(missing_ok=True)
    shown = orchestrator(local_node, command, *arguments)
    assert shown.returncode == 2, shown.stderr
    assert words in shown.stderr
    assert "deploy" not in shown.stderr
    assert not current.exists()


@pytest.mark.slow
def test_without_a_run_the_newest_with_a_checkpoint_is_evaluated_and_a_step_that_is_not_there_is_told(
    agent: Agent, local_node: NodeInfo, folder: Path
) -> None:
    run_id = run_with_a_checkpoint(agent, folder)
    start(agent, "print('nothing')", {})
    shown = orchestrator(local_node, "evaluate", "--set", "data.eval_rows=1", "--max-new-tokens", "2")
    assert shown.returncode == 0, shown.stderr
    assert f"runs/{run_id}/checkpoints/step-000001/drafter" in shown.stdout
    shown = orchestrator(local_node, "evaluate", "--checkpoint", "150")
    assert (shown.returncode, "of step 150" in shown.stderr) == (2, True), shown.stderr
    assert "It has checkpoints of step 1." in shown.stderr


def test_what_an_evaluation_does_not_use_is_refused_at_once(agent: Agent, local_node: NodeInfo) -> None:
    shown = orchestrator(local_node, "evaluate", "--set", "drafter.num_layers=7")
    assert shown.returncode == 2, shown.stderr
    assert "does not use drafter.num_layers" in shown.stderr
    assert "deploy" not in shown.stderr


def test_what_does_not_fit_a_runs_own_recipe_is_refused_before_anything_is_brought_there(
    agent: Agent, local_node: NodeInfo
) -> None:
    run_id = start(agent, "print('done')", load_recipe("tiny-cpu").to_dict())
    for run in (run_id,), ():
        shown = orchestrator(local_node, "evaluate", *run, "--set", "data.eval_rows=x")
        assert shown.returncode == 2, shown.stderr
        assert "data.eval_rows: " in shown.stderr
        assert "deploy" not in shown.stderr
