"""YAML to dataclasses, with the file and line of whatever does not fit."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from payload.errors import PayloadError

T = TypeVar("T")

_MAX_DEPTH = 16
"""Of a recipe; its own sections need three."""
_MAX_BITS = 63
_SHOWN = 80
"""Characters of a value in a message."""


@dataclass(frozen=True)
class Located:
    """A plain value read from YAML with where it stands; mappings and lists hold further ``Located``."""

    value: Any
    where: str


def read_yaml(path: Path) -> Located:
    """Read one YAML document. Raises ``PayloadError`` with file:line on a syntax error, an alias or a repeated key."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PayloadError(f"Cannot read {path}: {error.strerror}.", kind="usage") from error
    except UnicodeDecodeError as error:
        raise PayloadError(f"{path} is not UTF-8 text.", kind="usage") from error
    node = _compose(text, path)
    if node is None:
        return Located({}, f"{path}:1")
    return _from_node(node, path)


def locate(value: Any, where: str, depth: int = 0) -> Located:
    """Wrap plain JSON-like data so that ``bind`` can report ``where`` for every part of it.

    Raises ``PayloadError`` where it is nested deeper than any recipe.
    """
    if depth > _MAX_DEPTH:
        raise PayloadError(f"{where[:_SHOWN]}: nested more than {_MAX_DEPTH} deep.", kind="usage")
    if isinstance(value, dict):
        return Located(
            {key: locate(item, f"{where}: {key}", depth + 1) for key, item in value.items()}, where
        )
    if isinstance(value, list | tuple):
        return Located([locate(item, where, depth + 1) for item in value], where)
    return Located(value, where)


def bind(kind: type[T], located: Located, name: str = "") -> T:
    """Build the dataclass ``kind`` from a mapping. Raises ``PayloadError`` on unknown keys and misfit values."""
    if not isinstance(located.value, dict):
        raise PayloadError(f"{located.where}: {name or 'the recipe'} must be a mapping.", kind="usage")
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, kind)) if field.init}
    values: dict[str, Any] = {}
    for key, item in located.value.items():
        full = f"{name}.{key}" if name else str(key)
        if key not in fields:
            unknown = full if len(full) <= _SHOWN else f"{full[:_SHOWN]}…"
            raise PayloadError(
                f"{item.where}: unknown key {unknown}.",
                hint=f"Known keys: {', '.join(fields)}.",
                kind="usage",
            )
        values[key] = _fit(hints[key], item, full)
    for field in fields.values():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            full = f"{name}.{field.name}" if name else field.name
            raise PayloadError(f"{located.where}: {full} is missing.", kind="usage")
    return kind(**values)


class _Loader(yaml.SafeLoader):
    """Composes what a recipe may be: no aliases, by which a few lines can mean endlessly many, and no deep nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="a recipe has no aliases (*name)", problem_mark=mark)
        if self.depth == _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested more than {_MAX_DEPTH} deep", problem_mark=mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def _compose(text: str, path: Path) -> yaml.Node | None:
    line = 0
    try:
        loader = _Loader(text)
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
    raise PayloadError(f"{path}:{line + 1}: not valid YAML: {problem}.", kind="usage")


def _from_node(node: yaml.Node, path: Path) -> Located:
    where = f"{path}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Located] = {}
        for key_node, value_node in node.value:
            line = f"{path}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise PayloadError(f"{line}: a key must be text.", kind="usage")
            key = key_node.value
            if key in mapping:
                raise PayloadError(f"{line}: {key[:_SHOWN]} is given twice.", kind="usage")
            mapping[key] = Located(_from_node(value_node, path).value, line)
        return Located(mapping, where)
    if isinstance(node, yaml.SequenceNode):
        return Located([_from_node(item, path) for item in node.value], where)
    try:
        value = yaml.SafeLoader("").construct_object(node, deep=True)
        if isinstance(value, str):
            value.encode()
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        # PyYAML's constructors raise whatever they trip over in a text that is not what its tag says.
        raise PayloadError(f"{where}: {shown(node.value)} is not a valid value.", kind="usage") from error
    return Located(value, where)


def _fit(kind: Any, item: Located, name: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if item.value is None and type(None) in get_args(kind):
            return None
        options = [option for option in get_args(kind) if option is not type(None)]
        for option in options[:-1]:
            try:
                return _fit(option, item, name)
            except PayloadError:
                continue
        return _fit(options[-1], item, name)
    if origin is Literal:
        # YAML 1.1 reads a bare on or off as a boolean.
        value = (
            {True: "on", False: "off"}.get(item.value, item.value)
            if isinstance(item.value, bool)
            else item.value
        )
        if value not in get_args(kind):
            raise _misfit(item, name, "one of " + ", ".join(map(str, get_args(kind))))
        return value
    if origin is tuple:
        if not isinstance(item.value, list):
            raise _misfit(item, name, "a list")
        return tuple(_fit(get_args(kind)[0], element, name) for element in item.value)
    if dataclasses.is_dataclass(kind):
        return bind(typing.cast(type, kind), item, name)
    return _fit_scalar(kind, item, name)


def _fit_scalar(kind: Any, item: Located, name: str) -> Any:
    value = item.value
    if kind is float:
        # YAML 1.1 reads 6e-4, without a point, as text.
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise _misfit(item, name, "a number") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _misfit(item, name, "a number")
        try:
            return float(value)
        except OverflowError:
            raise _misfit(item, name, "a number below 1.8e308") from None
    wanted = {int: "a whole number", str: "text", bool: "true or false"}[kind]
    if type(value) is not kind:
        raise _misfit(item, name, wanted)
    if type(value) is int and value.bit_length() > _MAX_BITS:
        raise _misfit(item, name, f"a whole number of at most {_MAX_BITS} bits")
    return value


def _misfit(item: Located, name: str, wanted: str) -> PayloadError:
    return PayloadError(f"{item.where}: {name} must be {wanted}, not {shown(item)}.", kind="usage")


def shown(value: Any) -> str:
    """A value in a message, as Python writes it but never long."""
    plain = _plain(value)
    if isinstance(plain, int) and plain.bit_length() > _MAX_BITS:
        return "one of many digits"
    text = repr(plain)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _plain(value: Any) -> Any:
    """``value`` without where its parts stand; what is nested further than messages show is left out."""
    if isinstance(value, Located):
        return _plain(value.value)
    if isinstance(value, list):
        return [_brief(part) for part in value]
    return {key: _brief(part) for key, part in value.items()} if isinstance(value, dict) else value


def _brief(part: Any) -> Any:
    inner = part.value if isinstance(part, Located) else part
    return (
        ...
        if isinstance(inner, list | dict) or (type(inner) is int and inner.bit_length() > _MAX_BITS)
        else inner
    )
