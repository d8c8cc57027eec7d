import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from payload.agent.protocol import Request
from payload.compile.cache import cache_dir, read_manifest, verify
from payload.compile.warmup import distinct_roles, run_worker, warm_up
from payload.compile.worker import WorkRequest
from payload.errors import PayloadError
from payload.recipe import load_recipe
from tests.payload.compile.builders import Heard, needs_compiler, run_folder

REPO = Path(__file__).parents[3]
# The demo's own step, made small: one layer, short rows.
SMALL = {
    "compile": "on",
    "drafter.num_layers": 1,
    "train.batch_size": 1,
    "train.num_anchors": 4,
    "data.max_length": 64,
}


@pytest.fixture
def root(tmp_path):
    return tmp_path / "opt" / "dflash"


def test_each_role_that_ranks_have_is_one_program():
    def roles(targets, drafters):
        return distinct_roles(
            load_recipe("tiny-cpu", {"topology.targets": targets, "topology.drafters": drafters})
        )

    assert roles([0], [1]) == ("target", "drafter")
    assert roles([0], [0]) == ("both",)
    assert roles([0, 1], [1, 2]) == ("target", "drafter", "both")


def test_where_nothing_compiles_the_answer_is_plain(root):
    recipe = load_recipe("tiny-cpu", {"compile": "off"}).to_dict()
    result = warm_up(Request("n", str(root), {"recipe": recipe, "device": "cpu"}), Heard())
    assert result["compiled"] is False
    assert result["reason"] == "the recipe says compile: off"
    assert not cache_dir(str(root), result["fingerprint"]).path.exists()


def test_a_recipe_that_is_none_is_refused_in_the_protocols_words(root):
    request = json.dumps({"protocol": 1, "nonce": "n", "root": str(root), "recipe": {"target": 3}}) + "\n"
    ended = subprocess.run(
        [sys.executable, "-m", "payload.compile.warmup"],
        input=request.encode(),
        cwd=REPO,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert json.loads(ended.stdout)["error"]["kind"] == "usage"


@needs_compiler
@pytest.mark.parametrize("failure", [PayloadError("no such target", kind="usage"), KeyboardInterrupt()])
def test_a_warm_up_that_is_refused_leaves_no_cache_behind(root, monkeypatch, failure):
    def refuse(request, environment, folder):
        Path(environment["TRITON_CACHE_DIR"], "half").write_text("compiled")
        raise failure

    monkeypatch.setattr("payload.compile.warmup.run_worker", refuse)
    recipe = load_recipe("tiny-cpu", {"compile": "on"}).to_dict()
    for _ in range(2):
        with pytest.raises(type(failure)):
            warm_up(Request("n", str(root), {"recipe": recipe, "device": "cpu"}), Heard())
        assert list((root / "cache").iterdir()) == []


@pytest.mark.slow
def test_what_goes_wrong_in_the_compiling_process_is_told_in_its_words(tmp_path):
    recipe = load_recipe("tiny-cpu", {"target.model": "/no/such/model"}).to_dict()
    with pytest.raises(PayloadError, match=r"the step of role drafter: .*/no/such/model"):
        run_worker(WorkRequest(recipe, "drafter", "cpu"), {"PYTHONPATH": str(REPO)}, tmp_path)


def test_a_compiling_process_that_dies_is_told_with_the_end_of_its_output(tmp_path):
    with pytest.raises(PayloadError, match="died with exit status") as caught:
        run_worker(WorkRequest({}, "drafter", "cpu"), {"PYTHONHOME": "/no/such/python"}, tmp_path)
    assert caught.value.hint


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cache_is_warmed_proved_reused_mended_and_carried_to_another_container(root, tmp_path):
    recipe = load_recipe("tiny-cpu", SMALL).to_dict()
    heard = Heard()

    def warm(at=root, **fields):
        return warm_up(Request("n", str(at), {"recipe": recipe, "device": "cpu", **fields}), heard)

    first = warm()
    assert (first["source"], first["misses"]) == ("compiled", 0)
    by_role = {program["role"]: program for program in first["programs"]}
    assert by_role["drafter"]["misses"] == by_role["drafter"]["proved_hits"] > 0
    cache = cache_dir(str(root), first["fingerprint"])
    assert verify(cache) == []

    again = warm(prove=True)
    assert (again["source"], again["hits"]) == ("reused", first["hits"])
    assert verify(cache) == []

    # A role that the cache lacks is added to it, under a run that uses it.
    run_folder(root, "run-1", cache.fingerprint, state="running")
    recipe["topology"] = {"targets": [0], "drafters": [0]}
    both = warm()
    assert both["source"] == "compiled"
    assert [program["role"] for program in both["programs"]] == ["target", "drafter", "both"]
    manifest = read_manifest(cache)
    assert manifest is not None
    assert both["fingerprint"] == first["fingerprint"]

    # Damaged, it is refused: not touched under a live run, built anew without one.
    cache.artifact.write_bytes(b"damaged")
    with pytest.raises(PayloadError, match="in use by run-1"):
        warm()
    shutil.rmtree(root / "runs")
    recipe["topology"] = {"targets": [0], "drafters": [1]}
    heard.notes.clear()
    mended = warm()
    assert mended["source"] == "compiled"
    assert "artifact.bin is damaged" in heard.notes[0]
    assert verify(cache) == []

    elsewhere = tmp_path / "other" / "dflash"
    carried = warm(elsewhere, artifact=mended["artifact"]["path"])
    assert (carried["source"], carried["misses"]) == ("artifact", 0)
    assert verify(cache_dir(str(elsewhere), carried["fingerprint"])) == []


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_warm_step_is_not_traced_for_its_gradients_again_here_or_where_the_artifact_is_carried(tmp_path):
    recipe, artifact = load_recipe("tiny-cpu", SMALL).to_dict(), str(tmp_path / "artifact")

    def run(cache, **files):
        request = WorkRequest(recipe, role="drafter", device="cpu", **files)
        return run_worker(request, cache_dir(str(tmp_path / cache), "f").environment(), tmp_path)

    cold, warm = run("here", save=artifact), run("here")
    carried = run("elsewhere", load=artifact)
    assert (cold.misses, cold.retraced) == (cold.graphs, 1)
    assert (warm.hits, warm.retraced) == (carried.hits, carried.retraced) == (cold.graphs, 0)


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_release_in_another_folder_finds_what_this_one_compiled(root, tmp_path):
    recipe = load_recipe("tiny-cpu", SMALL).to_dict()
    request = (
        json.dumps({"protocol": 1, "nonce": "n", "root": str(root), "recipe": recipe, "prove": True}) + "\n"
    )

    def warm(release):
        ended = subprocess.run(
            [sys.executable, "-m", "payload.compile.warmup"],
            input=request.encode(),
            env={**os.environ, "PYTHONPATH": str(release)},
            cwd=tmp_path,
            capture_output=True,
            timeout=280,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout.decode() + ended.stderr.decode()
        return json.loads(ended.stdout.splitlines()[-1])["result"]

    for name in ("one", "two"):
        shutil.copytree(
            REPO / "payload", tmp_path / name / "payload", ignore=shutil.ignore_patterns("__pycache__")
        )
    first, second = warm(tmp_path / "one"), warm(tmp_path / "two")
    assert (first["source"], second["source"]) == ("compiled", "reused")
    assert second["fingerprint"] == first["fingerprint"]
