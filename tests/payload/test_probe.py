import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from payload import probe as module
from payload.probe import probe
from tests.payload.compile.builders import FACTS, run_folder, warm_cache

REPO = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path):
    return tmp_path / "opt" / "dflash"


def test_it_tells_which_build_this_is_and_whether_it_needs_the_guard(root):
    found = probe(str(root))
    assert found["torch"]["version"] == torch.__version__
    assert found["torch"]["git"] == torch.version.git_version
    assert found["fx_flag"]["home"] in ("global", "thread-local")
    assert found["fx_flag"]["flag_is_guarded"] == (found["fx_flag"]["home"] == "global")
    assert "def is_fx_symbolic_tracing" in found["fx_flag"]["source"]


def test_it_shows_flex_attention_and_dynamo_as_they_are(root):
    found = probe(str(root))
    assert found["flex_attention"]["signature"].startswith("(query")
    assert "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG" in found["flex_attention"]["compile_names"]
    assert found["dynamo"]["recompile_limit"] == torch._dynamo.config.recompile_limit
    assert found["devices"]["cpu"]["threads"] >= 1


def test_it_shows_the_compile_caches_with_their_size_and_who_pins_them(root):
    cache = warm_cache(root)
    run_folder(root, "run-1", FACTS.fingerprint)
    (told,) = probe(str(root))["cache"]["caches"]
    assert (told["fingerprint"], told["warm"], told["pinned_by"]) == (FACTS.fingerprint, True, ["run-1"])
    assert told["bytes"] == cache.size_bytes()


def test_a_section_that_cannot_be_read_says_why_and_the_others_are_there(root, monkeypatch):
    monkeypatch.setattr(module, "triton_version", lambda: 1 / 0)
    found = probe(str(root))
    assert found["compiler"] == {"error": "ZeroDivisionError: division by zero"}
    assert found["torch"]["version"] == torch.__version__


def test_it_answers_the_agents_protocol(root):
    request = json.dumps({"protocol": 1, "nonce": "n1", "root": str(root)}) + "\n"
    ended = subprocess.run(
        [sys.executable, "-m", "payload.probe"],
        input=request.encode(),
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    (line,) = ended.stdout.splitlines()
    answer = json.loads(line)
    assert answer["nonce"] == "n1"
    assert answer["result"]["packages"]["torch"]
