"""Each way in which flex_attention has silently run dense, closed. On a CPU, with the fence put up there."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo import config
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from payload.compile.never_dense import (
    DenseAttentionError,
    compiled_flex_attention,
    dense_score_bytes,
    forbid_dense,
)
from payload.drafter.attention import attend
from tests.payload.compile.builders import needs_compiler


@pytest.fixture(autouse=True)
def fence():
    torch._dynamo.reset()
    counters.clear()
    allow = forbid_dense(("cpu",))
    yield
    allow()
    torch._dynamo.reset()


def tensors(length=128, head_dim=16, dtype=torch.float32):
    query = torch.randn(1, 2, length, head_dim, dtype=dtype)
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, None, length, length, device="cpu")
    return query, torch.randn_like(query), torch.randn_like(query), mask


def test_one_the_compile_wrapper_taken_away():
    query, key, value, mask = tensors()
    with pytest.raises(DenseAttentionError, match=r"called without torch\.compile") as caught:
        flex_attention(query, key, value, block_mask=mask)
    assert "131,072 bytes" in caught.value.message
    assert "payload.drafter.attention.attend" in caught.value.hint
    assert caught.value.kind == "refused"


def test_two_the_error_of_the_race_suppressed():
    query, key, value, mask = tensors()
    with config.patch(error_on_nested_fx_trace=False):
        # As torch does then: inside a trace the compiled function is run uncompiled.
        with pytest.raises(DenseAttentionError, match="error_on_nested_fx_trace=False"):
            flex_attention(query, key, value, block_mask=mask)
        with pytest.raises(DenseAttentionError, match="error_on_nested_fx_trace=False") as caught:
            attend(query, key, value, mask)
    assert "guard.install()" in caught.value.hint


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_three_the_call_wrapped_in_another_compiled_function_that_makes_no_kernel_of_it(backend):
    query, key, value, mask = tensors()

    @torch.compile(backend=backend)
    def outer(query):
        return attend(query, key, value, mask) * 2

    with pytest.raises(DenseAttentionError, match="Its scores alone would have taken"):
        outer(query)


def test_four_compiling_into_the_trace_with_degraded_kernels():
    query, key, value, mask = tensors()
    with (
        config.patch(force_compile_during_fx_trace=True),
        pytest.raises(DenseAttentionError, match="degraded kernels"),
    ):
        attend(query, key, value, mask)


@needs_compiler
def test_the_recompile_limit_reached_by_the_call_itself():
    with config.patch(recompile_limit=1):
        compiled_flex_attention(*tensors(128))
        with pytest.raises(DenseAttentionError, match="limit of 1 recompilations") as caught:
            compiled_flex_attention(*tensors(256))
    assert "static" in caught.value.hint


def test_the_recompile_limit_reached_by_a_function_around_it():
    query, key, value, mask = tensors()
    passes = []

    @torch.compile(backend="eager", dynamic=False)
    def outer(padding):
        if not torch.compiler.is_compiling():
            passes.append("eager")
            return flex_attention(query, key, value, block_mask=mask)
        return padding + 1

    with config.patch(recompile_limit=2):
        outer(torch.ones(1))
        outer(torch.ones(2))
        with pytest.raises(DenseAttentionError, match="limit of 2 recompilations"):
            outer(torch.ones(3))
    assert passes == ["eager"]


@pytest.mark.parametrize(("setting", "value"), [("suppress_errors", True), ("disable", True)])
def test_settings_that_run_compiled_functions_uncompiled_are_named(setting, value):
    with config.patch({setting: value}), pytest.raises(DenseAttentionError, match=setting[:7]):
        attend(*tensors())


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda q, k, v: (q[..., :8], k[..., :8], v[..., :8]), "head size of at least 16"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "no kernel for torch.float64"),
        (lambda q, k, v: (q[0], k[0], v[0]), "4 dimensions"),
        (lambda q, k, v: (q.repeat(1, 2, 1, 1)[:, :3], k, v), "no multiple"),
    ],
)
def test_shapes_without_a_kernel_are_refused_by_cause(change, cause):
    query, key, value, mask = tensors()
    with pytest.raises(DenseAttentionError, match=cause):
        compiled_flex_attention(*change(query, key, value), mask)


def test_it_raises_before_anything_of_the_scores_size_is_allocated():
    query = torch.zeros(1, 1, 1 << 20, 16)  # scores of 4.4 TB
    with pytest.raises(DenseAttentionError, match=r"4398\.0 GB"):
        flex_attention(query, query, query)


def test_the_fence_stands_in_every_thread():
    query, key, value, mask = tensors()
    raised = []

    def call():
        try:
            flex_attention(query, key, value, block_mask=mask)
        except DenseAttentionError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(30)
    assert len(raised) == 1


@needs_compiler
def test_compiled_it_runs_and_equals_dense_attention():
    query, key, value, mask = tensors()
    causal = torch.ones(128, 128, dtype=torch.bool).tril()
    expected = attend(query, key, value, causal)
    assert torch.allclose(attend(query, key, value, mask), expected, atol=1e-5)


def test_a_device_that_is_not_fenced_may_run_dense():
    query, key, value, mask = tensors()
    allow = forbid_dense(("cuda",))
    # The outer fence, of this file, is the one that still refuses.
    with pytest.raises(DenseAttentionError):
        flex_attention(query, key, value, block_mask=mask)
    allow()


@settings(max_examples=30, deadline=None)
@given(st.tuples(*[st.integers(1, 5)] * 5))
def test_the_bytes_named_are_those_of_the_fp32_scores(sizes):
    batch, heads, queries, keys, head_dim = sizes
    query, key = torch.zeros(batch, heads, queries, head_dim), torch.zeros(batch, heads, keys, head_dim)
    scores = query @ key.transpose(-1, -2)
    assert dense_score_bytes(query, key) == scores.numel() * scores.element_size()
