import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from payload.agent.layout import Layout
from payload.agent.locks import hold
from payload.agent.protocol import Request
from payload.compile.cache import (
    cache_dir,
    cache_dirs,
    describe,
    hash_files,
    live_users,
    lock_name,
    parse_manifest,
    pinned_caches,
    prune,
    read_manifest,
    remove_cache,
    verify,
)
from payload.compile.manage import manage
from payload.errors import PayloadError
from tests.payload.compile.builders import FACTS, Heard, other_facts, run_folder, warm_cache


@pytest.fixture
def root(tmp_path):
    return tmp_path / "opt" / "dflash"


def ask(root, **fields):
    return manage(Request("n", str(root), fields), Heard())


def test_a_warm_cache_is_whole_and_its_manifest_says_for_what_it_was_made(root):
    cache = warm_cache(root)
    assert verify(cache) == []
    manifest = read_manifest(cache)
    assert manifest is not None
    assert manifest.facts == FACTS
    assert cache.fingerprint == FACTS.fingerprint


def test_a_cache_without_a_manifest_is_not_warm(root):
    cache = warm_cache(root)
    cache.manifest.unlink()
    assert read_manifest(cache) is None
    with pytest.raises(PayloadError, match="never warmed to the end"):
        verify(cache)


@pytest.mark.parametrize("name", ["artifact.bin", "inductor/fxgraph/ab/graph", "triton/kernel"])
def test_a_changed_or_missing_file_is_named(root, name):
    cache = warm_cache(root)
    file = cache.path / name
    file.write_bytes(file.read_bytes() + b"x")
    assert verify(cache) == [f"{file.name} is damaged ({file})"]
    file.unlink()
    assert verify(cache) == [f"{file.name} is missing ({file})"]


def test_files_that_a_later_run_adds_or_refines_are_no_fault(root):
    cache = warm_cache(root)
    (cache.inductor / "locks").mkdir()
    for name in ("inductor/fxgraph/new", "inductor/locks/a", "triton/a.lock", "triton/a.best_config"):
        (cache.path / name).write_bytes(b"later")
    assert verify(cache) == []
    assert set(hash_files(cache)) - {"inductor/fxgraph/new"} == {"inductor/fxgraph/ab/graph", "triton/kernel"}


def test_a_cache_under_another_name_is_refused(root):
    cache = warm_cache(root)
    cache.path.rename(cache.path.with_name("0" * 16))
    with pytest.raises(PayloadError, match="copied or renamed"):
        read_manifest(cache_dir(str(root), "0" * 16))


def test_a_manifest_whose_facts_were_edited_is_refused(root):
    cache = warm_cache(root)
    content = json.loads(cache.manifest.read_text())
    content["facts"]["torch"] = "2.99.0"
    cache.manifest.write_text(json.dumps(content))
    with pytest.raises(PayloadError, match="its facts make"):
        read_manifest(cache)


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda x: st.lists(x) | st.dictionaries(
            st.sampled_from(["version", "facts", "artifact", "programs", "fingerprint", "x"]), x), max_leaves=8,
        ).map(lambda value: json.dumps(value).encode()),
    )
)  # fmt: skip
def test_anything_else_in_place_of_a_manifest_is_refused_in_words(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("manifest") / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(PayloadError, match=r"manifest\.json"):
        parse_manifest(path)


def test_prune_keeps_what_any_run_pins_and_removes_the_rest(root):
    pinned, loose = warm_cache(root), warm_cache(root, other_facts(shapes="other"))
    run_folder(root, "run-1", pinned.fingerprint, state="finished")
    told = prune(str(root), apply=False)
    assert told["removed"] == [loose.fingerprint]
    assert loose.path.is_dir()
    assert told["bytes"] == loose.size_bytes() > 0
    done = prune(str(root), apply=True)
    assert done["removed"] == [loose.fingerprint]
    assert done["kept"] == {pinned.fingerprint: ["pinned by run-1"]}
    assert [cache.fingerprint for cache in cache_dirs(str(root))] == [pinned.fingerprint]
    assert verify(pinned) == []


def test_prune_leaves_a_cache_that_is_being_warmed(root):
    cache = warm_cache(root)
    with hold(Layout.at(str(root)), lock_name(cache.fingerprint), "warmup", "desk"):
        result = prune(str(root), apply=True)
    assert result["removed"] == []
    assert "held by desk" in result["kept"][cache.fingerprint][0]
    assert cache.path.is_dir()


def test_nothing_is_pruned_while_it_is_unknown_what_a_run_pins(root):
    cache = warm_cache(root)
    (run_folder(root, "run-1", None) / "spec.json").write_text("{")
    with pytest.raises(PayloadError, match="damaged"):
        prune(str(root), apply=True)
    assert cache.path.is_dir()


def test_a_cache_that_a_live_run_uses_is_not_removed_even_to_build_it_anew(root):
    cache = warm_cache(root)
    run = run_folder(root, "run-1", cache.fingerprint, state="running")
    assert live_users(str(root), cache.fingerprint) == ["run-1"]
    with pytest.raises(PayloadError, match="in use by run-1") as caught:
        remove_cache(str(root), cache)
    assert caught.value.kind == "busy"
    (run / "state.json").write_text(json.dumps({"state": "finished"}))
    remove_cache(str(root), cache)
    assert not cache.path.exists()


def test_a_root_without_anything_has_no_caches_and_no_pins(root):
    assert cache_dirs(str(root)) == []
    assert pinned_caches(str(root)) == {}
    assert ask(root, action="list") == {"caches": []}


def test_list_show_and_verify_tell_about_a_cache(root):
    cache = warm_cache(root)
    run_folder(root, "run-1", cache.fingerprint)
    (listed,) = ask(root, action="list")["caches"]
    assert listed == ask(root, action="show", fingerprint=cache.fingerprint)
    assert (listed["warm"], listed["pinned_by"], listed["bytes"]) == (True, ["run-1"], cache.size_bytes())
    assert ask(root, action="verify", fingerprint=cache.fingerprint)["whole"] is True
    (cache.triton / "kernel").unlink()
    assert ask(root, action="verify", fingerprint=cache.fingerprint)["whole"] is False


def test_a_damaged_cache_is_listed_with_what_is_wrong(root):
    cache = warm_cache(root)
    cache.manifest.write_text("{")
    told = describe(str(root), cache)
    assert told["warm"] is False
    assert "damaged" in told["problem"]


@pytest.mark.parametrize(
    "fields", [{"action": "burn"}, {}, {"action": "show"}, {"action": "show", "fingerprint": "../../etc"}]
)
def test_a_wrong_request_is_a_usage_error(root, fields):
    with pytest.raises(PayloadError) as caught:
        ask(root, **fields)
    assert caught.value.kind == "usage"


def test_caches_are_managed_without_torch(root, tmp_path):
    warm_cache(root)
    run = "runpy.run_module('payload.compile.manage', None, '__main__')"
    code = f"import runpy, sys; sys.modules['torch'] = None; {run}"
    request = json.dumps({"protocol": 1, "nonce": "n", "root": str(root), "action": "list"}) + "\n"
    repo = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", code], input=request.encode(), capture_output=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(repo)}, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr.decode()
    assert json.loads(ended.stdout)["result"]["caches"][0]["fingerprint"] == FACTS.fingerprint
