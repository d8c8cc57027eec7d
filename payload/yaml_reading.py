"""YAML text to values that know their lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from payload.errors import PayloadError
from payload.located import MAX_DEPTH, Fault, Located, shown

_MERGE = "tag:yaml.org,2002:merge"
_OPEN = object()
"""Stands for a mapping or list whose parts are being read."""


def read_yaml(path: Path, faults: list[Fault], *, aliases: bool = False) -> Located:
    """The one YAML document of a file; keys are text as it is written, an empty file is an empty mapping.

    Keys that stand twice are added to ``faults``, and their last value counts. Raises ``PayloadError`` (kind usage)
    with file:line for what is not YAML, for a value that is not what its tag says, and for aliases (``*name``) where
    they are not allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PayloadError(f"Cannot read {path}: {error.strerror}.", kind="usage") from error
    except UnicodeDecodeError as error:
        raise PayloadError(f"{path} is not UTF-8 text.", kind="usage") from error
    node = _compose(text, path, aliases)
    if node is None:
        return Located({}, str(path), 1)
    return Located(_Reader(path, faults).read(node), str(path), _line(node))


class _Loader(yaml.SafeLoader):
    """Composes no deep nesting, and aliases only where they are allowed."""

    aliases = False
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        if not self.aliases and self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="no aliases (*name) are allowed here", problem_mark=mark)
        if self.depth == MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep", problem_mark=mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def _compose(text: str, path: Path, aliases: bool) -> yaml.Node | None:
    line = 0
    try:
        loader = _Loader(text)
        loader.aliases = aliases
        try:
            node: yaml.Node | None = loader.get_single_node()
        except yaml.YAMLError:
            raise
        except (ValueError, OverflowError) as error:
            # Numbers of an escape or a directive that fit no character and no integer.
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=loader.get_mark()) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line if error.problem_mark else 0
        problem = error.problem or str(error)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        problem = f"{error.reason} (character {error.character!r})"
    else:
        return node
    raise PayloadError(f"{path}:{line + 1}: not YAML: {problem}.", kind="usage")


class _Reader:
    """Nodes of one file to values. What aliases name is read once: a few lines cannot mean endlessly many."""

    def __init__(self, path: Path, faults: list[Fault]) -> None:
        self._source = str(path)
        self._faults = faults
        self._constructor = yaml.constructor.SafeConstructor()
        self._values: dict[yaml.Node, Any] = {}

    def read(self, node: yaml.Node) -> Any:
        """The plain value of ``node``, with ``Located`` as its parts."""
        if node not in self._values:
            self._values[node] = _OPEN
            self._values[node] = self._read(node)
        if self._values[node] is _OPEN:
            raise self._error(_line(node), "nested without end (an alias of itself)")
        return self._values[node]

    def _read(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node)
        if isinstance(node, yaml.SequenceNode):
            return [self._located(part, _line(part)) for part in node.value]
        return self._scalar(node)

    def _located(self, node: yaml.Node, line: int) -> Located:
        return Located(self.read(node), self._source, line)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Located]:
        own: dict[str, Located] = {}
        merged: dict[str, Located] = {}
        seen: set[str] = set()
        for key_node, value_node in node.value:
            line = _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(line, "a key must be text")
            key = self._text(key_node)
            if key in seen:
                again = Located(key, self._source, line)
                self._faults.append(Fault(again, "", f"{shown(key)} stands here a second time"))
            seen.add(key)
            part = self._located(value_node, line)
            if key_node.tag == _MERGE:
                merged = self._merged(part)
            else:
                own[key] = part
        return {**merged, **own}

    def _merged(self, part: Located) -> dict[str, Located]:
        """What ``<<`` brings into a mapping; of several, the first that has a key gives its value."""
        merged: dict[str, Located] = {}
        for base in part.value if isinstance(part.value, list) else [part]:
            if not isinstance(base.value, dict):
                raise self._error(base.line, "<< takes a mapping, or a list of them")
            merged = {**base.value, **merged}
        return merged

    def _text(self, node: yaml.Node) -> str:
        try:
            node.value.encode()
        except UnicodeEncodeError as error:
            raise self._invalid(node) from error
        return str(node.value)

    def _scalar(self, node: yaml.Node) -> Any:
        self._text(node)
        try:
            return self._constructor.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            # PyYAML's constructors raise whatever they trip over in a text that is not what its tag says.
            raise self._invalid(node) from error

    def _invalid(self, node: yaml.Node) -> PayloadError:
        return self._error(
            _line(node), f"{shown(node.value)} is not a valid value", "Quote it if it is meant as text."
        )

    def _error(self, line: int, problem: str, hint: str = "") -> PayloadError:
        return PayloadError(f"{self._source}:{line}: {problem}.", hint=hint, kind="usage")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
