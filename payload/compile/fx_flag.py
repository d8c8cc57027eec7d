"""Where this torch keeps its FX tracing flag: read from torch's own source, not from its version number.

``torch.fx._symbolic_trace`` sets a flag for the time of a trace, and every call of a compiled function asks
for it. Up to torch 2.13 the flag is a module global, so that a trace in one thread makes compiled calls in
all others raise (pytorch#168999); from 2.14 it is thread-local.
"""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

FLAG = "_is_fx_tracing_flag"
READERS = ("is_fx_tracing", "is_fx_symbolic_tracing")


class FlagHome(enum.Enum):
    """Whose the flag is."""

    GLOBAL = "global"
    THREAD_LOCAL = "thread-local"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class FlagReport:
    """Where the flag lives in one torch build, and why we think so."""

    home: FlagHome
    reason: str


def inspect_flag(module: ModuleType) -> FlagReport:
    """Tell where ``module`` (``torch.fx._symbolic_trace``, or a stand-in of its form) keeps the flag.

    GLOBAL is said only when the two readers return the global and ``Tracer.trace`` is its one writer: what
    the guard relies on. Anything that is neither that nor visibly thread-local is UNKNOWN.
    """
    readers = {name: getattr(module, name, None) for name in READERS}
    trace = getattr(getattr(module, "Tracer", None), "trace", None)
    missing = [name for name, reader in readers.items() if not isinstance(reader, FunctionType)]
    if missing or not isinstance(trace, FunctionType):
        return FlagReport(FlagHome.UNKNOWN, f"it lacks {', '.join(missing) or 'Tracer.trace'}")
    if FLAG not in vars(module):
        if _has_thread_local_flag(module):
            return FlagReport(FlagHome.THREAD_LOCAL, "the flag is an attribute of a threading.local")
        return FlagReport(FlagHome.UNKNOWN, f"it has neither {FLAG} nor a threading.local for it")
    strangers = [name for name, reader in readers.items() if not _returns_flag(reader)]
    if strangers:
        return FlagReport(
            FlagHome.UNKNOWN, f"{' and '.join(strangers)} read the flag in a way not seen before"
        )
    if not isinstance(vars(module)[FLAG], bool):
        return FlagReport(FlagHome.UNKNOWN, f"{FLAG} is a {type(vars(module)[FLAG]).__name__}, not a bool")
    writers = _functions_writing_flag(module)
    if writers != ["trace"]:
        by = ", ".join(writers) or "nobody"
        return FlagReport(FlagHome.UNKNOWN, f"{FLAG} is written by {by}, not by trace alone")
    return FlagReport(FlagHome.GLOBAL, f"{FLAG} is a module global, written by Tracer.trace")


def _parse(source_of: Any) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(source_of)))
    except (OSError, TypeError, SyntaxError):
        return None


def _has_thread_local_flag(module: ModuleType) -> bool:
    """Some ``threading.local`` of the module's is read, through at most one helper, by both readers."""
    tree = _parse(module)
    if tree is None:
        return False
    locals_ = {name for name, value in vars(module).items() if type(value).__name__ == "_local"}
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

    def reads_local(name: str, depth: int) -> bool:
        names = {node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
        helpers = (names & functions.keys()) - {name}
        return bool(names & locals_) or (
            depth > 0 and any(reads_local(helper, depth - 1) for helper in helpers)
        )

    return all(name in functions and reads_local(name, depth=1) for name in READERS)


def _returns_flag(reader: Any) -> bool:
    """The function's one return statement gives the flag, perhaps with a further condition."""
    tree = _parse(reader)
    if tree is None:
        return False
    returns = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    if len(returns) != 1:
        return False
    value = returns[0]
    first = value.values[0] if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.And) else value
    return isinstance(first, ast.Name) and first.id == FLAG


def _functions_writing_flag(module: ModuleType) -> list[str]:
    tree = _parse(module)
    if tree is None:
        return []
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(inner, ast.Global) and FLAG in inner.names for inner in ast.walk(node))
    ]
