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


@dataclass(frozen=True)
class Located:
    """A plain value read from YAML with where it stands; mappings and lists hold further ``Located``."""

    value: Any
    where: str


def read_yaml(path: Path) -> Located:
    """Read one YAML document. Raises ``PayloadError`` with file:line on a syntax error or a repeated key."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise PayloadError(f"Cannot read {path}: {error.strerror}.", kind="usage") from error
    except UnicodeDecodeError as error:
        raise PayloadError(f"{path} is not UTF-8 text.", kind="usage") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise PayloadError(f"{where}: not valid YAML: {problem}.", kind="usage") from error
    if node is None:
        return Located({}, f"{path}:1")
    return _from_node(node, path)


def locate(value: Any, where: str) -> Located:
    """Wrap plain JSON-like data so that ``bind`` can report ``where`` for every part of it."""
    if isinstance(value, dict):
        return Located({key: locate(item, f"{where}: {key}") for key, item in value.items()}, where)
    if isinstance(value, list | tuple):
        return Located([locate(item, where) for item in value], where)
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
            raise PayloadError(
                f"{item.where}: unknown key {full}.", hint=f"Known keys: {', '.join(fields)}.", kind="usage"
            )
        values[key] = _fit(hints[key], item, full)
    for field in fields.values():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            full = f"{name}.{field.name}" if name else field.name
            raise PayloadError(f"{located.where}: {full} is missing.", kind="usage")
    return kind(**values)


def _from_node(node: yaml.Node, path: Path) -> Located:
    where = f"{path}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Located] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = f"{path}:{key_node.start_mark.line + 1}"
            if key in mapping:
                raise PayloadError(f"{line}: {key} is given twice.", kind="usage")
            mapping[key] = Located(_from_node(value_node, path).value, line)
        return Located(mapping, where)
    if isinstance(node, yaml.SequenceNode):
        return Located([_from_node(item, path) for item in node.value], where)
    loader = yaml.SafeLoader("")
    try:
        return Located(loader.construct_object(node), where)
    except (yaml.YAMLError, ValueError) as error:
        raise PayloadError(f"{where}: {node.value!r} is not a valid value.", kind="usage") from error


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
        return float(value)
    wanted = {int: "a whole number", str: "text", bool: "true or false"}[kind]
    if type(value) is not kind:
        raise _misfit(item, name, wanted)
    return value


def _misfit(item: Located, name: str, wanted: str) -> PayloadError:
    shown = [part.value for part in item.value] if isinstance(item.value, list) else item.value
    return PayloadError(f"{item.where}: {name} must be {wanted}, not {shown!r}.", kind="usage")
