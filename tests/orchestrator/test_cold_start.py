"""`train --cold`: nothing is compiled beforehand, and a cache that is warm already is used all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.agent import Agent
from orchestrator.console import Console
from orchestrator.deploy import PAYLOAD
from orchestrator.train import prepare
from orchestrator.venv import BuiltVenv
from orchestrator.warmup import Warmed, warm_up
from payload.agent.release import tree_hash
from payload.recipe import Recipe
from tests.orchestrator.test_evaluate import VENV, agent
from tests.payload.trainer.jobs import save_tiny_target, tiny_recipe

__all__ = ["agent"]
QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The venv of these tests is there already, and the desk keeps no artifact."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("orchestrator.train.build_venv", lambda *_, **__: BuiltVenv(VENV, False, "", ""))


def recipe(folder: Path, compiling: str) -> Recipe:
    target = save_tiny_target(folder / "target")
    return tiny_recipe(target, compile=compiling, drafter__mask_token_id=1)


def cold(agent: Agent, folder: Path, compiling: str) -> Warmed | None:
    return prepare(agent.container, recipe(folder, compiling), QUIET, cold=True).warmed


def test_a_cold_start_compiles_nothing_beforehand(agent: Agent, folder: Path) -> None:
    assert cold(agent, folder, "on") is None
    nothing = cold(agent, folder, "off")
    assert nothing is not None
    assert not nothing.compiled


def test_a_cold_start_goes_on_where_the_cache_cannot_be_looked_at(
    agent: Agent, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("orchestrator.train.build_venv", lambda *_, **__: BuiltVenv("0" * 16, False, "", ""))
    assert prepare(agent.container, recipe(folder, "on"), Console(), cold=True).warmed is None
    assert "whether a cache is warm is not known" in capfd.readouterr().err


@pytest.mark.slow
def test_a_cold_start_uses_a_cache_that_is_warm(agent: Agent, folder: Path) -> None:
    release = tree_hash(PAYLOAD)
    with QUIET.step("warmup") as report:
        warm = warm_up(agent, report, release=release, venv=VENV, recipe=recipe(folder, "on"))
    found = cold(agent, folder, "on")
    assert found is not None
    assert found.cache == warm.cache
