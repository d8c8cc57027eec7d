"""Recognition of torch's tracing flag, on small modules of the forms that torch has had."""

import importlib.util
import threading

import pytest
import torch.fx._symbolic_trace as symbolic_trace

from payload.compile.fx_flag import FlagHome, inspect_flag
from payload.compile.private_trace import PrivateTraces
from payload.errors import PayloadError

GLOBAL = """
import torch
_is_fx_tracing_flag = False

def is_fx_tracing_warning():
    pass

def is_fx_tracing():
    is_fx_tracing_warning()
    return _is_fx_tracing_flag

def is_fx_symbolic_tracing():
    return _is_fx_tracing_flag and not torch.compiler.is_compiling()

class _Patcher:
    def patch_method(self, cls, name, new_fn, deduplicate=True):
        pass

class Tracer:
    def trace(self, root):
        global _is_fx_tracing_flag
        old = _is_fx_tracing_flag
        _is_fx_tracing_flag = True
        try:
            return root()
        finally:
            _is_fx_tracing_flag = old
"""
ANNOTATED = GLOBAL.replace("def is_fx_tracing():", "def is_fx_tracing() -> bool:").replace(
    "def is_fx_symbolic_tracing():", "def is_fx_symbolic_tracing() -> bool:"
)
THREAD_LOCAL = """
import threading
import torch
_is_fx_tracing_tls = threading.local()

def _get_is_fx_tracing():
    return getattr(_is_fx_tracing_tls, "flag", False)

def is_fx_tracing():
    return _get_is_fx_tracing()

def is_fx_symbolic_tracing():
    return _get_is_fx_tracing() and not torch.compiler.is_compiling()

class _Patcher:
    def patch_method(self, cls, name, new_fn, deduplicate=True):
        pass

class Tracer:
    def trace(self, root):
        before = _get_is_fx_tracing()
        _is_fx_tracing_tls.flag = True
        try:
            return root()
        finally:
            _is_fx_tracing_tls.flag = before
"""
UNKNOWN = {
    "no readers": "class Tracer:\n    def trace(self): pass\n",
    "no tracer": GLOBAL.replace("class Tracer", "class Recorder"),
    "flag in a dict": GLOBAL.replace("_is_fx_tracing_flag = False", "_is_fx_tracing_flag = {}", 1),
    "inverted": GLOBAL.replace("return _is_fx_tracing_flag and", "return not _is_fx_tracing_flag or"),
    "two returns": GLOBAL.replace(
        "    return _is_fx_tracing_flag and",
        "    if False:\n        return True\n    return _is_fx_tracing_flag and",
    ),
    "another writer": GLOBAL
    + "\ndef reset():\n    global _is_fx_tracing_flag\n    _is_fx_tracing_flag = False\n",
    "no writer": GLOBAL.replace("        global _is_fx_tracing_flag\n", ""),
    "flag elsewhere": GLOBAL.replace("_is_fx_tracing_flag", "_state_flag"),
    "a counter in C": GLOBAL.replace(
        "def is_fx_symbolic_tracing():", "is_fx_symbolic_tracing = len\ndef other():"
    ),
}


@pytest.fixture
def module_of(tmp_path):
    def load(source):
        path = tmp_path / "stand_in.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("stand_in", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("source", [GLOBAL, ANNOTATED])
def test_a_global_flag_is_recognised(module_of, source):
    assert inspect_flag(module_of(source)).home is FlagHome.GLOBAL


def test_a_thread_local_flag_is_recognised(module_of):
    assert inspect_flag(module_of(THREAD_LOCAL)).home is FlagHome.THREAD_LOCAL


@pytest.mark.parametrize("source", UNKNOWN.values(), ids=UNKNOWN)
def test_any_other_form_is_unknown_and_refused_before_anything_is_changed(module_of, source):
    module = module_of(source)
    before = dict(vars(module))
    assert inspect_flag(module).home is FlagHome.UNKNOWN
    with pytest.raises(PayloadError, match="does not know") as caught:
        PrivateTraces(module, threading.RLock())
    assert caught.value.kind == "refused"
    assert dict(vars(module)) == before


def test_a_patcher_of_another_form_is_refused(module_of):
    module = module_of(GLOBAL.replace("name, new_fn, deduplicate=True", "patch"))
    with pytest.raises(PayloadError, match="_Patcher"):
        PrivateTraces(module, threading.RLock())


def test_this_torch_is_known():
    assert inspect_flag(symbolic_trace).home is not FlagHome.UNKNOWN


@pytest.mark.parametrize("source", [GLOBAL, ANNOTATED, THREAD_LOCAL])
def test_applied_the_flag_is_the_tracing_threads_own_and_reverted_the_module_is_as_before(module_of, source):
    module = module_of(source)
    asked_early = module.is_fx_symbolic_tracing
    before = (type(module), module.Tracer.trace, module._Patcher.patch_method, asked_early.__code__)
    traces = PrivateTraces(module, threading.RLock())
    traces.apply()
    seen = {}

    def root():
        other = threading.Thread(target=lambda: seen.update(other=asked_early()))
        other.start()
        other.join()
        seen["own"] = asked_early()

    module.Tracer().trace(root)
    assert seen == {"own": True, "other": False}
    assert asked_early() is False
    traces.revert()
    assert (type(module), module.Tracer.trace, module._Patcher.patch_method, asked_early.__code__) == before
    assert asked_early() is False


def test_applied_other_modules_of_torch_that_set_the_flag_set_their_own_threads(module_of):
    module = module_of(GLOBAL)
    traces = PrivateTraces(module, threading.RLock())
    traces.apply()
    seen = []

    def root():
        before = module._is_fx_tracing_flag
        module._is_fx_tracing_flag = False
        seen.extend([before, module.is_fx_tracing()])
        module._is_fx_tracing_flag = before
        seen.append(module.is_fx_tracing())

    module.Tracer().trace(root)
    assert seen == [True, False, True]
    traces.revert()
    assert vars(module)["_is_fx_tracing_flag"] is False
