"""Lets threads of one process compile without hurting each other, and keeps later steps from compiling at all.

Applied once, at the start of a process::

    guard = install()
    with guard.first_step():      # in each thread that trains: one at a time, backward and optimizer included
        step()
    guard.seal()                  # once every thread has made its first step
    while training:
        with guard.steady():      # takes no lock; an unexpected recompile becomes an error that explains itself
            step()

What it prevents, and by what:

1. A trace in one thread makes compiled calls in all others raise: traces become private (private_trace.py).
2. The deadlock of the lazy backward. Thread A holds dynamo's ``compile_lock`` and, tracing flex_attention's joint
   graph, waits for the GPU's one autograd thread; that thread compiles thread B's first backward and waits for
   ``compile_lock``. So first steps are made one at a time, backward included, and backward graphs are compiled with
   their forward, in the thread that called it: an autograd thread never compiles.
3. Metadata of a trace is kept in process-wide dictionaries (pytorch#184917, open): one first step at a time.
4. An uncompiled flex_attention on a GPU raises before it writes its score matrix, in every thread (never_dense.py).

A lock around a first step alone cannot deadlock with ``compile_lock``: every thread takes the two in this order,
and autograd threads take neither.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from payload.compile.never_dense import forbid_dense
from payload.compile.private_trace import PrivateTraces
from payload.errors import PayloadError

OnRecompile = Literal["error", "count"]

_log = logging.getLogger(__name__)
_install_lock = threading.Lock()
_installed: Guard | None = None

# How torch's RuntimeError under the stance fail_on_recompile begins.
_RECOMPILE_MESSAGE = "Detected recompile when torch.compile stance is 'fail_on_recompile'"

# (config module, name, value). In torch of today a setting belongs to a thread (a ContextVar): each sets its own.
_SETTINGS = (
    # A backward graph is compiled with its forward, never in an autograd thread.
    ("torch._functorch.config", "force_non_lazy_backward_lowering", True),
    # The drafter is one graph under DDP too: the one that was warmed. Splitting at buckets refuses flex_attention.
    ("torch._dynamo.config", "optimize_ddp", False),
    # At the limit dynamo would run the function uncompiled, after one warning.
    ("torch._dynamo.config", "fail_on_recompile_limit_hit", True),
)


@dataclass
class Guard:
    """The guard of this process; made by :func:`install`."""

    traces: PrivateTraces
    allow_dense: Callable[[], None]
    settings_before: dict[tuple[str, str], Any]
    _turn: Any = field(default_factory=threading.RLock)
    _sealed: bool = False

    @contextmanager
    def first_step(self) -> Iterator[None]:
        """Hold the one process-wide turn for a whole first step: forward, backward and optimizer.

        For each thread that trains, and for anything else that compiles before :meth:`seal`. Threads that have
        had their first step may run freely meanwhile. Reentrant within a thread.
        """
        with self._turn:
            _apply_settings()
            yield

    def seal(self, on_recompile: OnRecompile = "error") -> None:
        """Every first step is made: from now on nothing should compile.

        ``error`` makes any further compilation raise, in every thread, before it begins. ``count`` lets it happen,
        under torch's own lock; FirstStepWatch.compiled_since counts it.
        """
        with self._turn:
            if on_recompile == "error":
                _set_stance("fail_on_recompile")
            self._sealed = True

    def unseal(self) -> None:
        """Let things compile again, as before :meth:`seal`."""
        with self._turn:
            if self._sealed:
                _set_stance("default")
            self._sealed = False

    @contextmanager
    def steady(self) -> Iterator[None]:
        """A step after the first: takes no lock. Raises PayloadError (kind ``refused``) if it would compile."""
        try:
            yield
        except RuntimeError as error:
            explained = explain_recompile(error)
            if explained is None:
                raise
            raise explained from error


def install() -> Guard:
    """Apply the guard to this process, once; a second call returns the same guard.

    Raises PayloadError (kind ``refused``) when this torch's internals are not known to it.
    """
    global _installed
    with _install_lock:
        if _installed is None:
            import torch.fx._symbolic_trace as symbolic_trace
            from torch._dynamo import convert_frame

            traces = PrivateTraces(symbolic_trace, _known_compile_lock(convert_frame))
            settings_before = _apply_settings()
            traces.apply()
            _installed = Guard(traces, forbid_dense(), settings_before)
            _log.info(
                "compile guard installed (tracing flag was %s)",
                "global" if traces.flag_was_global else "local",
            )
        return _installed


def remove() -> None:
    """Take the guard off again; waits for traces under way. Without an installed guard nothing happens."""
    global _installed
    with _install_lock:
        if _installed is not None:
            _installed.unseal()
            _installed.traces.revert()
            _installed.allow_dense()
            for (module, name), value in _installed.settings_before.items():
                setattr(importlib.import_module(module), name, value)
            _installed = None


def explain_recompile(error: BaseException) -> PayloadError | None:
    """What a person needs to know when a sealed process would have compiled; None for any other error."""
    text = str(error)
    if _RECOMPILE_MESSAGE not in text:
        return None
    reasons = text.partition(_RECOMPILE_MESSAGE)[2].lstrip(". ").strip()
    return PayloadError(
        f"training would have compiled again after its first step: {reasons}",
        "A shape, dtype or mode differs from the first step's. Keep shapes static (pad the last batch), or let "
        "recompiles through with train.on_recompile=count: they are counted, logged and slow.",
        kind="refused",
    )


def _apply_settings() -> dict[tuple[str, str], Any]:
    """Apply the settings to the calling thread; returns what they were."""
    before = {}
    for module, name, value in _SETTINGS:
        config = importlib.import_module(module)
        if not hasattr(config, name):
            raise PayloadError(
                f"this torch has no setting {module}.{name}, which the compile guard relies on",
                "Pin a torch that the compile guard knows: 2.11 to 2.14.",
                kind="refused",
            )
        before[module, name] = getattr(config, name)
        setattr(config, name, value)
    return before


def _known_compile_lock(convert_frame: Any) -> Any:
    lock = getattr(convert_frame, "compile_lock", None)
    if not isinstance(lock, type(threading.RLock())):
        raise PayloadError(
            "this torch's dynamo has no reentrant compile_lock where the compile guard expects it",
            "Pin a torch that the compile guard knows: 2.11 to 2.14.",
            kind="refused",
        )
    return lock


def _set_stance(stance: str) -> None:
    import torch

    torch.compiler.set_stance(stance)
