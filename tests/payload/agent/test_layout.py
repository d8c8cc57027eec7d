"""What lies below a container's root: one list of it, where the layout is defined."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from payload.agent.layout import OWN, Layout

REPOSITORY = Path(__file__).parents[3]
LAYOUT = Layout.at("/opt/dflash")


def test_the_tools_own_names_are_exactly_the_places_of_the_layout() -> None:
    places = {
        getattr(LAYOUT, name).name
        for name, value in vars(Layout).items()
        if isinstance(value, property) and name != "own"
    }
    assert places == set(OWN)
    assert len(OWN) == len(set(OWN))


def test_nothing_is_made_below_the_root_but_by_a_name_of_the_layout() -> None:
    named = {
        f"{path.relative_to(REPOSITORY)}:{line}": name
        for room in ("payload", "orchestrator")
        for path in (REPOSITORY / room).rglob("*.py")
        if path.name != "layout.py" and "localnode" not in path.parts
        for line, name in names_below_the_root(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert {"runs", "releases", "tools"} <= set(named.values())
    assert {where: name for where, name in named.items() if name not in OWN} == {}


def names_below_the_root(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The first names of ``root / "x/..."`` and ``f"{root}/x/..."``, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _is_root(node.left):
            if isinstance(node.right, ast.Constant):
                yield node.lineno, str(node.right.value).split("/")[0]
        elif isinstance(node, ast.JoinedStr):
            for part, after in zip(node.values, node.values[1:], strict=False):
                text = str(after.value) if isinstance(after, ast.Constant) else ""
                of_root = isinstance(part, ast.FormattedValue) and _is_root(part.value)
                if of_root and text.startswith("/") and len(text) > 1:
                    yield node.lineno, text.split("/")[1]


def _is_root(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and node.args:
        return _is_root(node.args[0])
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)) == "root"
