import pytest
import torch

from payload.compile.cache import cache_dir
from payload.compile.counts import read_counts
from payload.compile.fingerprint import collect_facts
from payload.compile.first_step import FirstStepWatch, require_warm
from payload.compile.policy import decide
from payload.errors import PayloadError
from payload.recipe import load_recipe
from tests.payload.compile.builders import other_facts, warm_cache


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A C++ compiler for all that anybody asks of it here, so that these tests need none."""
    path = tmp_path / "c++"
    path.write_text("#!/bin/sh\necho 'c++ 1.0'\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


@pytest.fixture
def spec(compiler):
    recipe = load_recipe("tiny-cpu", {"compile": "on"}).to_dict()
    return {"recipe": recipe, "cache": collect_facts(recipe, "cpu").fingerprint}


@pytest.fixture
def root(tmp_path, monkeypatch, spec):
    root = tmp_path / "opt" / "dflash"
    for name, value in cache_dir(str(root), spec["cache"]).environment().items():
        monkeypatch.setenv(name, value)
    return root


def test_a_warm_cache_lets_training_start(root, spec):
    warm_cache(root, collect_facts(spec["recipe"], "cpu"))
    manifest = require_warm(spec, "cpu")
    assert manifest is not None
    assert manifest.fingerprint == spec["cache"]


def test_a_cold_cache_refuses_to_start_unless_told_to(root, spec):
    with pytest.raises(PayloadError, match="is cold") as caught:
        require_warm(spec, "cpu")
    assert caught.value.kind == "refused"
    assert "--cold-ok" in caught.value.hint
    assert require_warm(spec, "cpu", cold_ok=True) is None


def test_a_cache_that_is_warm_for_another_build_or_recipe_is_refused(root, spec, monkeypatch):
    cache = warm_cache(root, other_facts(torch="2.10.0"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache.inductor))
    with pytest.raises(PayloadError, match=f"uses {cache.fingerprint}"):
        require_warm(spec, "cpu")
    warm_cache(root, collect_facts(spec["recipe"], "cpu"))
    changed = load_recipe("tiny-cpu", {"compile": "on", "train.batch_size": 7}).to_dict()
    with pytest.raises(PayloadError, match=r"code and recipe need"):
        require_warm({**spec, "recipe": changed}, "cpu")


def test_a_run_without_any_cache_is_refused(spec, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with pytest.raises(PayloadError, match="has no compile cache"):
        require_warm(spec, "cpu")


def test_a_damaged_manifest_is_refused(root, spec):
    cache = warm_cache(root, collect_facts(spec["recipe"], "cpu"))
    cache.manifest.write_text("{}")
    with pytest.raises(PayloadError, match="not a manifest"):
        require_warm(spec, "cpu")


def test_where_nothing_is_compiled_there_is_nothing_to_be_cold():
    assert require_warm({"recipe": load_recipe("tiny-cpu", {"compile": "off"}).to_dict()}, "cpu") is None


def test_the_first_steps_report_counts_its_compilations_and_names_the_attention():
    torch._dynamo.reset()
    watch = FirstStepWatch("cpu")
    function = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    function(torch.ones(2))
    function(torch.ones(3))
    report = watch.report()
    assert (report.counts.compilations, report.counts.recompiles) == (2, 1)
    assert report.seconds > 0
    assert "dense scaled_dot_product_attention on the cpu" in report.line()
    assert report.to_dict()["recompiles"] == 1
    assert watch.compiled_since() is None


def test_counts_are_differences_to_an_earlier_reading():
    before = read_counts()
    assert read_counts().since(before) == before.since(before)


def test_a_cpu_without_a_compiler_runs_uncompiled_and_says_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    decision = decide("auto", "cpu")
    assert not decision.compiled
    assert "no C++ compiler is installed" in decision.reason
    with pytest.raises(PayloadError, match="compile: on") as caught:
        decide("on", "cpu")
    assert "g++" in caught.value.hint


def test_the_recipe_can_say_off_and_a_compiler_makes_auto_compile(compiler):
    assert not decide("off", "cpu").compiled
    assert decide("auto", "cpu").compiled


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build brings Triton")
def test_a_gpu_without_triton_is_an_error():
    with pytest.raises(PayloadError, match="Triton"):
        decide("auto", "cuda")
