from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from payload.agent.protocol import Request
from payload.agent.usage import unused
from payload.drafter.checkpoint import load_drafter, save_drafter
from payload.drafter.model import DFlashDrafter
from payload.errors import PayloadError
from payload.evaluate import run_evaluation
from payload.places import ROOT_VARIABLE
from payload.trainer.checkpoint import find_drafter, write_checkpoint
from payload.trainer.evaluation import evaluate_everywhere
from payload.trainer.roles import Roles
from tests.payload.trainer.jobs import run, tiny_recipe
from tests.payload.trainer.test_parts import CONFIG, snapshot


def ask(
    root: Path, module: str = "payload.evaluate", **fields: Any
) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """The exit status, the final line and the events before it of one request to a module."""
    request = {"protocol": 1, "nonce": "n1", "root": str(root), **fields}
    ended = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    *events, final = map(json.loads, ended.stdout.splitlines())
    return ended.returncode, final, events


class Heard(list[dict[str, Any]]):
    """Stands where the protocol's events go, and keeps them."""

    def note(self, message: str) -> None:
        self.append({"message": message})

    def progress(self, message: str, done: int | None = None, total: int | None = None) -> None:
        self.append({"message": message} if done is None else {"done": done, "total": total})


def asked(
    root: Path, handler: Any = run_evaluation, **fields: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result and the events of one request, without a process for it."""
    heard = Heard()
    return handler(Request("n1", str(root), fields), heard), heard


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


def test_a_run_that_is_just_being_removed_is_not_evaluated(finished: tuple[Path, dict[str, Any]]) -> None:
    root, _ = finished
    with unused(root / "runs" / "a") as free:
        assert free
        with pytest.raises(PayloadError) as caught:
            asked(root, drafter="runs/a", device="cpu")
    assert caught.value.kind == "busy"


def test_a_run_is_evaluated_with_its_own_recipe_and_what_is_changed_of_it(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    root, _ = finished
    overrides = {"data.eval_rows": 20, "train.eval_max_new_tokens": 4}
    result, events = asked(root, drafter="runs/a", device="cpu", overrides=overrides)
    assert result["drafter"].endswith("step-000006/drafter")
    assert (result["prompts"], result["tokens"]) == (20, 80)
    assert [(event["done"], event["total"]) for event in events if "done" in event] == [(0, 20), (16, 20)]


def test_a_run_and_its_export_have_the_same_accepted_length(finished: tuple[Path, dict[str, Any]]) -> None:
    root, made = finished
    result, _ = asked(root, drafter="runs/a", device="cpu")
    last = made["job"].lines("eval")[-1]
    for name in ("accepted_length", "accepted_by_position", "tokens", "target_forwards", "identical"):
        assert result[name] == last[name]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"drafter": "runs/b"}, "neither an export nor a run"),
        ({"drafter": "runs/a", "checkpoint": "latest"}, "newest, best or a step"),
        ({"drafter": "runs/a", "prompts": "nope.jsonl"}, "/nope.jsonl of prompts.*make put.*TO=nope.jsonl"),
    ],
)
def test_what_cannot_be_evaluated_is_said_in_words(
    finished: tuple[Path, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, str],
    words: str,
) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, str(finished[0]))
    with pytest.raises(PayloadError) as caught:
        asked(finished[0], device="cpu", **fields)
    assert caught.value.kind == "usage"
    assert re.search(words, f"{caught.value.message} {caught.value.hint}")


def test_what_training_decodes_with_is_the_drafter_as_it_is_exported(tmp_path: Path) -> None:
    drafter, seen = DFlashDrafter(CONFIG), {}
    where, roles = SimpleNamespace(rank=0, device=torch.device("cpu")), Roles((0,), (0,), accumulation=1)
    alone = SimpleNamespace(evaluation=None, drafters=None)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        shape = SimpleNamespace(dtype=dtype)
        run = SimpleNamespace(config=CONFIG, ranks=where, roles=roles, groups=alone, shape=shape)
        side = SimpleNamespace(evaluate=lambda state, compare_plain: seen.update(state))
        program = SimpleNamespace(drafter=drafter)
        evaluate_everywhere(run, side, program, compare_plain=False)  # type: ignore[arg-type]
        exported, _ = load_drafter(save_drafter(tmp_path / "drafter", drafter, CONFIG), dtype=dtype)
        for name, tensor in exported.state_dict().items():
            assert seen[name].dtype == dtype
            assert torch.equal(seen[name], tensor), name


def test_a_run_is_evaluated_by_its_newest_whole_checkpoint(finished: tuple[Path, dict[str, Any]]) -> None:
    root, made = finished
    (root / "runs" / "a" / "checkpoints" / "step-000006" / "state.json").write_text("{}")
    status, final, events = ask(root, recipe=made["recipe"], drafter="runs/a", device="cpu", at_once=1)
    assert status == 0, final
    result = final["result"]
    assert result["drafter"].endswith("step-000003/drafter")
    assert result["prompts"] == 2
    assert result["identical"] == 2
    assert 1.0 <= result["accepted_length"] <= 4.0
    assert any("passed over" in event.get("message", "") for event in events)


def test_a_checkpoint_is_chosen_by_newest_by_step_or_as_the_best(tmp_path: Path) -> None:
    for step, accepted in ((1, 2.0), (2, 3.0), (3, None)):
        write_checkpoint(tmp_path / "checkpoints", snapshot(step, accepted), CONFIG)
    for checkpoint, step in (("newest", 3), ("1", 1), ("best", 2)):
        found = find_drafter(tmp_path, checkpoint, print)
        assert found == tmp_path / "checkpoints" / f"step-{step:06d}" / "drafter"
        assert find_drafter(found, checkpoint, print) == found
    for checkpoint, words in (("9", "no drafter in .* of step 9"), ("latest", "newest, best or a step")):
        with pytest.raises(PayloadError, match=words) as caught:
            find_drafter(tmp_path, checkpoint, print)
        assert caught.value.kind == "usage"
