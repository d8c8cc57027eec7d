"""flex_attention that runs compiled or raises: never the dense fallback, which writes the whole score matrix.

Two fences:

- :func:`compiled_flex_attention` is the front door that training calls. It refuses, with the reason, what would not
  run as one compiled kernel, before anything is allocated.
- :func:`forbid_dense` closes the back door: torch has one function each through which every uncompiled
  flex_attention goes, forward and backward, however it came to be uncompiled. In its place stands a refusal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from payload.errors import PayloadError

# torch/_inductor/kernel/flex: "embedding dimension of the query, key, and value must be at least 16".
MIN_HEAD_DIM = 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCORE_BYTES = 4  # dense scores are computed in fp32


def _with_gradient(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, grouped: bool) -> Any:
    return flex_attention(query, key, value, block_mask=block_mask, enable_gqa=grouped)


def _without_gradient(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, grouped: bool) -> Any:
    return flex_attention(query, key, value, block_mask=block_mask, enable_gqa=grouped)


# torch keeps compiled code by function, and code compiled for one gradient mode is not used in the other. A rank with
# both roles calls in both modes: of one function, the second would be a recompilation.
_compiled = {
    wants_gradient: torch.compile(function, dynamic=False, fullgraph=True)
    for wants_gradient, function in ((True, _with_gradient), (False, _without_gradient))
}


class DenseAttentionError(PayloadError):
    """flex_attention would have run uncompiled, or slower than its kernels are, and nobody would have been told."""

    def __init__(self, query: Tensor, key: Tensor, cause: str, fix: str) -> None:
        shape = f"query {list(query.shape)}, key {list(key.shape)}"
        super().__init__(
            f"flex_attention refused to run dense ({shape} on {query.device}): {cause}. "
            f"Its scores alone would have taken {_readable(dense_score_bytes(query, key))}.",
            fix,
            kind="refused",
        )


def dense_score_bytes(query: Tensor, key: Tensor) -> int:
    """Bytes of the fp32 scores [B, heads, Q, KV] that dense attention of these tensors writes."""
    return query[..., 0].numel() * key.shape[-2] * SCORE_BYTES


def compiled_flex_attention(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask) -> Tensor:
    """Attention [B, heads, Q, D] of ``query[B, heads, Q, D]`` over ``key, value[B, kv heads, KV, D]``, compiled.

    Inside a larger compiled graph the call becomes a part of it. Raises DenseAttentionError when it would run in any
    other way: see :func:`refuse_settings`; shapes that have no kernel; too many recompilations.
    """
    grouped = query.shape[1] != key.shape[1]
    if torch.compiler.is_compiling():
        return _tensor(flex_attention(query, key, value, block_mask=block_mask, enable_gqa=grouped))
    _refuse_shapes(query, key, value)
    refuse_settings(query, key)
    try:
        return _tensor(_compiled[torch.is_grad_enabled()](query, key, value, block_mask, grouped))
    except FailOnRecompileLimitHit:
        raise DenseAttentionError(
            query, key, *_recompile_limit(torch._dynamo.config.recompile_limit)
        ) from None
    except RuntimeError as error:
        if _is_from_compiler(error):
            cause = f"it cannot be compiled for them ({str(error).partition(chr(10))[0]})"
            raise DenseAttentionError(
                query, key, cause, "Change the shapes or the mask; see the cause."
            ) from error
        raise


def refuse_settings(query: Tensor, key: Tensor) -> None:
    """Raise DenseAttentionError if torch is set so that compiled calls run uncompiled or with degraded kernels.

    The settings are torch's own (``torch._dynamo.config``), which people reach for when threads race: each hides the
    race and costs the speed, or the memory.
    """
    found = unsafe_setting()
    if found is not None:
        raise DenseAttentionError(query, key, *found)


def unsafe_setting() -> tuple[str, str] | None:
    """(cause, fix) of the first setting in force that lets compiled functions run uncompiled; None when all is safe."""
    config: Any = torch._dynamo.config
    guard = "Set it back to {}; payload.compile.guard.install() lets threads compile at once without it."
    if not getattr(config, "error_on_nested_fx_trace", True):
        return "error_on_nested_fx_trace=False runs it uncompiled during any trace", guard.format(True)
    if getattr(config, "force_compile_during_fx_trace", False):
        cause = "force_compile_during_fx_trace=True compiles it into a trace, with degraded kernels"
        return cause, guard.format(False)
    if config.suppress_errors:
        return (
            "suppress_errors=True runs it uncompiled when it fails to compile",
            "Set suppress_errors to False.",
        )
    if config.disable:
        return "torch.compile is disabled (TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE)", "Unset it."
    return None


def forbid_dense(devices: tuple[str, ...] = ("cuda",)) -> Callable[[], None]:
    """Make every uncompiled flex_attention on ``devices`` (device types) raise DenseAttentionError, in all threads.

    Returns the function that allows it again. Raises PayloadError (kind ``refused``) when this torch has no such one
    place.
    """
    undo = [_fence(operator, devices) for operator in _operators()]

    def allow() -> None:
        for each in undo:
            each()

    return allow


def _operators() -> tuple[Any, Any]:
    try:
        from torch._higher_order_ops.flex_attention import flex_attention as forward
        from torch._higher_order_ops.flex_attention import flex_attention_backward as backward
    except ImportError as error:
        raise _unknown(str(error)) from None
    for operator in (forward, backward):
        if DispatchKey.CompositeExplicitAutograd not in getattr(operator, "py_kernels", {}):
            raise _unknown(f"{operator} has no dense kernel of its own")
    return forward, backward


def _unknown(why: str) -> PayloadError:
    return PayloadError(
        f"this torch's flex_attention is of a form that the guard against dense attention does not know: {why}",
        "Pin a torch that it knows: 2.11 to 2.14.",
        kind="refused",
    )


def _fence(operator: Any, devices: tuple[str, ...]) -> Callable[[], None]:
    dense = operator.py_kernels[DispatchKey.CompositeExplicitAutograd]

    def refuse(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        if query.device.type in devices:
            raise DenseAttentionError(query, key, *_why_uncompiled())
        return dense(query, key, *args, **kwargs)

    _set_dense_kernel(operator, refuse)
    return lambda: _set_dense_kernel(operator, dense)


def _set_dense_kernel(operator: Any, kernel: Callable[..., Any]) -> None:
    operator.py_kernels[DispatchKey.CompositeExplicitAutograd] = kernel
    # Kernels are remembered by dispatch key once they were looked up.
    operator._dispatch_cache.clear()


def _why_uncompiled() -> tuple[str, str]:
    """The likeliest cause: settings first, then a frame at its recompile limit, then a call that was never compiled."""
    found = unsafe_setting()
    if found is not None:
        return found
    # Dynamo counts what it gave up on by the text of its explanation. By now flex_attention has lifted the limit.
    for explanation in counters["unimplemented"]:
        reached = re.match(
            r"Dynamo recompile limit exceeded.*?currently set to (\d+)", explanation, re.DOTALL
        )
        if reached is not None:
            return _recompile_limit(int(reached.group(1)))
    return (
        "it was called without torch.compile",
        "Call payload.drafter.attention.attend, which compiles it, and compile whatever calls it as one whole graph.",
    )


def _recompile_limit(limit: int) -> tuple[str, str]:
    return (
        f"torch's limit of {limit} recompilations of one function was reached",
        "Keep shapes static: pad batches to one length and number of anchors. TORCH_LOGS=recompiles names the cause.",
    )


def _refuse_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    def refuse(cause: str, fix: str) -> None:
        raise DenseAttentionError(query, key, cause, fix)

    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        refuse("query, key and value must have 4 dimensions", "Pass [batch, heads, length, head size].")
    if min(query.shape[-1], value.shape[-1]) < MIN_HEAD_DIM:
        refuse(f"its kernels need a head size of at least {MIN_HEAD_DIM}", "Set drafter.head_dim.")
    if query.dtype not in DTYPES:
        refuse(f"it has no kernel for {query.dtype}", "Use bfloat16, float16 or float32.")
    if query.shape[1] % key.shape[1]:
        refuse("the query heads are no multiple of the key heads", "Set drafter.num_key_value_heads.")


def _is_from_compiler(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[2].startswith(("_dynamo", "_inductor"))


def _tensor(out: Any) -> Tensor:
    assert isinstance(out, Tensor)  # a tuple only when auxiliary outputs are asked for
    return out


def _readable(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e8 else f"{size_bytes:,} bytes"
