"""Makes an FX trace the private affair of the thread that traces.

torch keeps three things of a trace where every thread sees them:

- the flag that a trace is going on (to torch 2.13, pytorch#168999): compiled calls in other threads raise;
- the patches of ``nn.Module.__call__`` and ``__getattr__`` (in all versions so far, pytorch#187589): modules called
  in other threads are recorded into a trace that is not theirs;
- the order in which those patches are taken back: two traces that overlap leave one of the patches in place for good.

Applied, the flag is read and written per thread, a patch acts in the tracing thread alone, and traces take turns.
They take turns by dynamo's own ``compile_lock``, for there must be one lock only: compiling traces, and a trace
may compile, so that with two of them two threads could wait for each other.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import threading
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from payload.compile.fx_flag import FLAG, READERS, FlagHome, inspect_flag
from payload.errors import PayloadError

_QUESTION = "_payload_thread_is_tracing"


class PrivateTraces:
    """The change to one ``torch.fx._symbolic_trace`` module: :meth:`apply` it, :meth:`revert` it.

    ``turn`` is the lock that traces hold, a reentrant one. Raises PayloadError (kind ``refused``) on construction
    when the module is not of a form known to it; nothing has been changed then.
    """

    def __init__(self, module: ModuleType, turn: threading.RLock) -> None:
        report = inspect_flag(module)
        patcher = getattr(module, "_Patcher", None)
        if report.home is FlagHome.UNKNOWN or not _is_known_patcher(patcher):
            why = report.reason if report.home is FlagHome.UNKNOWN else "its _Patcher has another form"
            raise PayloadError(
                f"this torch's tracing is of a form that the compile guard does not know: {why}",
                "Pin a torch that it knows (2.11 to 2.14), or let one process alone compile: a rank for each GPU.",
                kind="refused",
            )
        self.flag_was_global = report.home is FlagHome.GLOBAL
        self._module: Any = module
        self._patcher: Any = patcher
        self._turn: Any = turn
        self._tracing = threading.local()
        self._undo: list[Callable[[], None]] = []

    def apply(self) -> None:
        """Make traces private. To be called while nothing traces."""
        with self._turn:
            if self.flag_was_global:
                self._make_flag_private()
            self._make_trace_take_turns()
            self._make_patches_private()

    def revert(self) -> None:
        """Put everything back as it was; waits until no thread traces or compiles."""
        with self._turn:
            while self._undo:
                self._undo.pop()()

    def is_tracing(self) -> bool:
        """Whether the calling thread is inside a trace (only kept where the flag was global)."""
        return getattr(self._tracing, "flag", False)

    def _set_tracing(self, value: bool) -> None:
        self._tracing.flag = value

    def _make_flag_private(self) -> None:
        module = self._module
        # New code in the same function objects: compiled functions made earlier hold references to the functions.
        for name in READERS:
            reader = getattr(module, name)
            self._on_revert(setattr, reader, "__code__", reader.__code__)
            reader.__code__ = _asking_instead(reader)
        vars(module)[_QUESTION] = self.is_tracing
        self._on_revert(vars(module).pop, _QUESTION)
        # Other modules of torch read and write the flag as an attribute: a property on the module's class meets them.
        # Inside the module it is a plain global still, which nobody reads any more.
        flag = property(lambda _: self.is_tracing(), lambda _, value: self._set_tracing(value))
        self._on_revert(setattr, module, "__class__", type(module))
        module.__class__ = type("ModuleWithPrivateFlag", (type(module),), {FLAG: flag})
        # Traces of several threads may have left either value behind.
        self._on_revert(vars(module).__setitem__, FLAG, False)

    def _make_trace_take_turns(self) -> None:
        tracer, original = self._module.Tracer, self._module.Tracer.trace

        @functools.wraps(original)
        def trace(*args: Any, **kwargs: Any) -> Any:
            with self._turn:
                before = self.is_tracing()
                self._set_tracing(True)
                try:
                    return original(*args, **kwargs)
                finally:
                    self._set_tracing(before)

        self._on_revert(setattr, tracer, "trace", original)
        tracer.trace = trace

    def _make_patches_private(self) -> None:
        patcher, original = self._patcher, self._patcher.patch_method

        @functools.wraps(original)
        def patch_method(self: Any, cls: type, name: str, new_fn: Any, deduplicate: bool = True) -> None:
            original(self, cls, name, _only_in_this_thread(new_fn, getattr(cls, name)), deduplicate)

        self._on_revert(setattr, patcher, "patch_method", original)
        patcher.patch_method = patch_method

    def _on_revert(self, function: Callable[..., Any], *args: Any) -> None:
        self._undo.append(lambda: function(*args))


def _only_in_this_thread(new: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    owner = threading.get_ident()

    @functools.wraps(new)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == owner else original)(*args, **kwargs)

    return dispatch


def _is_known_patcher(patcher: Any) -> bool:
    method = getattr(patcher, "patch_method", None)
    if not isinstance(method, FunctionType):
        return False
    return list(inspect.signature(method).parameters) == ["self", "cls", "name", "new_fn", "deduplicate"]


class _FlagToQuestion(ast.NodeTransformer):
    """Turns every read of the flag into a call of the question that is answered per thread."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id != FLAG:
            return node
        return ast.Call(func=ast.Name(id=_QUESTION, ctx=ast.Load()), args=[], keywords=[])


def _asking_instead(reader: FunctionType) -> CodeType:
    """The reader's own code, at its own lines, with the flag's name replaced by a question per thread."""
    tree = _FlagToQuestion().visit(ast.parse(textwrap.dedent(inspect.getsource(reader))))
    ast.increment_lineno(tree, reader.__code__.co_firstlineno - 1)
    names: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(tree), reader.__code__.co_filename, "exec"), names)
    code: CodeType = names[reader.__name__].__code__
    return code
