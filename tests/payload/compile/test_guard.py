import threading
import time
from contextlib import contextmanager

import pytest
import torch
import torch.fx._symbolic_trace as symbolic_trace
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config

from payload.compile.first_step import FirstStepWatch, alarm_line
from payload.compile.guard import explain_recompile, install, remove
from payload.errors import PayloadError

DEADLINE_S = 30.0


@pytest.fixture
def guard():
    yield install()
    remove()


@pytest.fixture(autouse=True)
def forget_what_other_tests_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextmanager
def another_thread_inside_a_trace():
    """While the block runs, another thread is inside torch.fx.symbolic_trace."""
    inside, done = threading.Event(), threading.Event()

    def traced(x):
        inside.set()
        done.wait(DEADLINE_S)
        return x * 2

    thread = threading.Thread(target=torch.fx.symbolic_trace, args=(traced,), daemon=True)
    thread.start()
    assert inside.wait(DEADLINE_S)
    try:
        yield
    finally:
        done.set()
        thread.join(DEADLINE_S)


def in_thread(work):
    """Run ``work`` in a thread of its own and hand on what it returns or raises."""
    outcome = []

    def run():
        try:
            outcome.append((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again below
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert outcome, "the thread hangs"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def compiled_plus_one():
    function = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    function(torch.ones(3))
    return function


def test_compiled_calls_and_modules_work_while_another_thread_traces(guard):
    function, module = compiled_plus_one(), nn.Linear(3, 2)
    expected = module(torch.ones(3))
    with another_thread_inside_a_trace():
        assert function(torch.ones(3)).tolist() == [2, 2, 2]
        assert torch.equal(module(torch.ones(3)), expected)


def test_a_function_that_was_compiled_before_the_guard_came_is_safe_too():
    function = compiled_plus_one()
    install()
    try:
        with another_thread_inside_a_trace():
            assert function(torch.ones(3)).tolist() == [2, 2, 2]
    finally:
        remove()


def test_a_trace_still_refuses_a_compiled_call_of_its_own_thread(guard):
    function = compiled_plus_one()
    with pytest.raises(RuntimeError, match="symbolically trace"):
        torch.fx.symbolic_trace(lambda x: function(x))


def test_a_trace_records_its_own_threads_modules(guard):
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert [node.op for node in graph.graph.nodes].count("call_module") == 2


def test_traces_of_two_threads_take_turns_and_leave_modules_as_they_were(guard):
    call, getattr_ = nn.Module.__call__, nn.Module.__getattr__
    running, most = [], []

    def traced(x):
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()
        return x

    threads = [threading.Thread(target=torch.fx.symbolic_trace, args=(traced,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert most == [1, 1, 1]
    assert (nn.Module.__call__, nn.Module.__getattr__) == (call, getattr_)


def test_install_is_idempotent_and_remove_puts_everything_back():
    before = (
        type(symbolic_trace),
        symbolic_trace.Tracer.trace,
        symbolic_trace.is_fx_symbolic_tracing.__code__,
        functorch_config.force_non_lazy_backward_lowering,
        dynamo_config.optimize_ddp,
        dynamo_config.fail_on_recompile_limit_hit,
    )
    assert install() is install()
    assert functorch_config.force_non_lazy_backward_lowering is True
    remove()
    remove()
    assert before == (
        type(symbolic_trace),
        symbolic_trace.Tracer.trace,
        symbolic_trace.is_fx_symbolic_tracing.__code__,
        functorch_config.force_non_lazy_backward_lowering,
        dynamo_config.optimize_ddp,
        dynamo_config.fail_on_recompile_limit_hit,
    )


def test_a_torch_without_a_needed_setting_is_refused(monkeypatch):
    from payload.compile import guard as module

    monkeypatch.setattr(module, "_SETTINGS", (("torch._functorch.config", "no_such_setting", True),))
    trace = symbolic_trace.Tracer.trace
    with pytest.raises(PayloadError, match="no_such_setting") as caught:
        install()
    assert caught.value.kind == "refused"
    assert symbolic_trace.Tracer.trace is trace


def test_first_steps_are_made_one_at_a_time(guard):
    inside, most = [], []

    def step():
        with guard.first_step(), guard.first_step():
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()

    threads = [threading.Thread(target=step) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert most == [1, 1, 1]


def test_a_first_step_compiles_the_backward_with_its_forward_in_every_thread(guard):
    compiled = []

    def forward_only():
        with guard.first_step():
            from torch._dynamo.backends.common import aot_autograd

            def count(graph, inputs):
                compiled.append(threading.current_thread().name)
                return graph.forward

            function = torch.compile(lambda x: (x * x).sum(), backend=aot_autograd(fw_compiler=count))
            function(torch.ones(3, requires_grad=True))
            return threading.current_thread().name

    name = in_thread(forward_only)
    assert compiled == [name, name]


def test_a_steady_step_takes_no_lock(guard):
    function = compiled_plus_one()
    with guard.first_step():

        def steady():
            with guard.steady():
                return function(torch.ones(3)).tolist()

        assert in_thread(steady) == [2, 2, 2]


def test_after_the_seal_another_shape_is_an_error_that_names_the_guard_that_failed(guard):
    function = compiled_plus_one()
    guard.seal()
    with guard.steady():
        function(torch.ones(3))
    with pytest.raises(PayloadError, match="compiled again after its first step") as caught, guard.steady():
        function(torch.ones(4))
    assert caught.value.kind == "refused"
    assert "size mismatch" in caught.value.message


def test_the_seal_holds_in_every_thread(guard):
    function = compiled_plus_one()
    guard.seal()

    def another_shape():
        with guard.steady():
            function(torch.ones(4))

    with pytest.raises(PayloadError, match="compiled again"):
        in_thread(another_shape)


def test_a_seal_that_counts_lets_recompiles_through_and_the_watch_raises_an_alarm(guard):
    function = compiled_plus_one()
    watch = FirstStepWatch("cpu")
    watch.report()
    guard.seal(on_recompile="count")
    assert watch.compiled_since() is None
    with guard.steady():
        assert function(torch.ones(4)).tolist() == [2, 2, 2, 2]
    late = watch.compiled_since()
    assert late is not None
    assert alarm_line(late).startswith("ALARM: 1 frames were compiled after the first step (1 of them again")
    assert watch.compiled_since() is None


def test_unsealed_things_compile_again(guard):
    function = compiled_plus_one()
    guard.seal()
    guard.unseal()
    assert function(torch.ones(4)).tolist() == [2, 2, 2, 2]


def test_other_errors_of_a_steady_step_stay_themselves(guard):
    with pytest.raises(RuntimeError, match="something else"), guard.steady():
        raise RuntimeError("something else")
    assert explain_recompile(ValueError("x")) is None
