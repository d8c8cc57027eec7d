from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.payload.trainer.jobs import run, tiny_recipe


def ask(root: Path, **fields: Any) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """The exit status, the final line and the events before it of one request to ``payload.evaluate``."""
    request = {"protocol": 1, "nonce": "n1", "root": str(root), **fields}
    ended = subprocess.run(
        [sys.executable, "-m", "payload.evaluate"],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    *events, final = map(json.loads, ended.stdout.splitlines())
    return ended.returncode, final, events


@pytest.fixture(scope="module")
def finished(
    tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("root")
    recipe = tiny_recipe(
        tiny_target_folder, data__eval=["demo"], data__eval_rows=2, train__checkpoint_every=3
    )
    job = run(root / "runs" / "a", recipe)
    assert job.wait() == [0], job.output()
    return root, {"recipe": recipe.to_dict(), "job": job}


def test_a_run_is_evaluated_by_its_newest_whole_checkpoint(finished: tuple[Path, dict[str, Any]]) -> None:
    root, made = finished
    (root / "runs" / "a" / "checkpoints" / "step-000006" / "state.json").write_text("{}")
    status, final, events = ask(root, recipe=made["recipe"], drafter="runs/a", device="cpu")
    assert status == 0, final
    result = final["result"]
    assert result["drafter"].endswith("step-000003/drafter")
    assert result["prompts"] == 2
    assert result["identical"] == 2
    assert 1.0 <= result["accepted_length"] <= 4.0
    assert any("passed over" in event.get("message", "") for event in events)


def test_a_folder_without_a_drafter_is_an_error_in_words(finished: tuple[Path, dict[str, Any]]) -> None:
    root, made = finished
    status, final, _ = ask(root, recipe=made["recipe"], drafter="runs", device="cpu")
    assert status == 1
    assert final["error"]["kind"] == "usage"
    assert "no drafter" in final["error"]["message"]
