"""Located values to frozen dataclasses, with the place of all that does not fit.

Fields are scalars, ``X | None``, ``Literal``, ``tuple[X, ...]``, ``dict[str, X]`` and further dataclasses. In
``Annotated[X, ...]``, a function takes a value that fits ``X`` and returns what to keep; its ``ValueError``
tells the fault. A ``Shorthand`` reads what stands there in place of a list or mapping.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from payload.located import MAX_BITS, Fault, Located, refuse

T = TypeVar("T")

_NEEDED = {
    int: "a whole number is needed",
    float: "a number is needed",
    bool: "true or false is needed",
    str: "text is needed (quote it)",
}
_TOO_LARGE = "the number is too large"


@dataclass(frozen=True)
class Shorthand:
    """How a scalar is read where the field is a list or a mapping; ``ValueError`` tells what is wrong with it."""

    read: Callable[[Any], Any]


def require(holds: Callable[[Any], object], problem: str) -> Callable[[T], T]:
    """For ``Annotated``: a value must make ``holds`` true, or ``problem`` is told."""

    def checked(value: T) -> T:
        if not holds(value):
            raise ValueError(problem)
        return value

    return checked


def at_least(lowest: float) -> Callable[[float], float]:
    return require(lambda value: value >= lowest, "the number is too small")


def at_most(highest: float) -> Callable[[float], float]:
    return require(lambda value: value <= highest, _TOO_LARGE)


def bind(kind: type[T], located: Located, faults: Sequence[Fault] = ()) -> T:
    """Build the dataclass ``kind`` from a mapping.

    Raises ``PayloadError`` (kind usage) that tells all misfits, unknown and missing keys, and the ``faults`` that
    reading found.
    """
    found = list(faults)
    value = _fit(kind, located, "", found)
    refuse(found)
    return typing.cast(T, value)


def _fit(kind: Any, item: Located, name: str, faults: list[Fault]) -> Any:
    """``item`` as a ``kind``. Where it is none, a fault, and whatever: nobody sees a value with faults."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _fit_annotated(kind, item, name, faults)
    if origin in (Union, types.UnionType):
        (option,) = (option for option in get_args(kind) if option is not types.NoneType)
        return None if item.value is None else _fit(option, item, name, faults)
    if origin is tuple:
        return _fit_tuple(get_args(kind)[0], item, name, faults)
    if origin is dict:
        return _fit_dict(get_args(kind), item, name, faults)
    if dataclasses.is_dataclass(kind):
        return _fit_dataclass(typing.cast(type, kind), item, name, faults)
    try:
        return _choice(get_args(kind), item.value) if origin is Literal else _scalar(kind, item.value)
    except ValueError as error:
        faults.append(Fault(item, name, str(error)))
        return None


def _fit_annotated(kind: Any, item: Located, name: str, faults: list[Fault]) -> Any:
    plain, *extras = get_args(kind)
    before = len(faults)
    try:
        shorthand = next((extra for extra in extras if isinstance(extra, Shorthand)), None)
        if shorthand and not isinstance(item.value, list | dict):
            value = shorthand.read(item.value)
        else:
            value = _fit(plain, item, name, faults)
        for extra in extras:
            if callable(extra) and len(faults) == before:
                value = extra(value)
    except ValueError as error:
        faults.append(Fault(item, name, str(error)))
        return None
    return value


def _fit_tuple(kind: Any, item: Located, name: str, faults: list[Fault]) -> tuple[Any, ...]:
    if not isinstance(item.value, list):
        faults.append(Fault(item, name, "a list is needed"))
        return ()
    return tuple(_fit(kind, part, f"{name}.{number}", faults) for number, part in enumerate(item.value))


def _fit_dict(kinds: tuple[Any, ...], item: Located, name: str, faults: list[Fault]) -> dict[str, Any]:
    parts = _parts(item, name, faults)
    key_kind, kind = kinds
    values = {}
    for key, part in parts.items():
        inner = _inner(name, key)
        values[_fit(key_kind, dataclasses.replace(part, value=key), inner, faults)] = _fit(
            kind, part, inner, faults
        )
    return values


def _fit_dataclass(kind: type, item: Located, name: str, faults: list[Fault]) -> Any:
    before = len(faults)
    parts = _parts(item, name, faults)
    if len(faults) > before:
        return None
    fields = _fields(kind)
    values = {}
    for key, (hint, required) in fields.items():
        if key in parts:
            values[key] = _fit(hint, parts[key], _inner(name, key), faults)
        elif required:
            faults.append(Fault(dataclasses.replace(item), _inner(name, key), "is missing"))
    known = f"Known keys{f' of {name}' if name else ''}: {', '.join(fields)}."
    for key, part in parts.items():
        if key not in fields:
            faults.append(Fault(part, _inner(name, key), "there is no such key", known))
    return kind(**values) if len(faults) == before else None


def _parts(item: Located, name: str, faults: list[Fault]) -> dict[str, Located]:
    if isinstance(item.value, dict):
        return item.value
    faults.append(Fault(item, name, "a mapping is needed"))
    return {}


@functools.cache
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """Of a dataclass: each key's type, and whether it must be there."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: (
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(typing.cast(Any, kind))
        if field.init
    }


def _inner(name: str, key: str) -> str:
    return f"{name}.{key}" if name else str(key)


def _choice(options: tuple[Any, ...], value: Any) -> Any:
    if isinstance(value, bool):
        # YAML 1.1 reads a bare on or off as a boolean.
        value = "on" if value else "off"
    if value not in options:
        raise ValueError(f"one of {', '.join(map(str, options))} is needed")
    return value


def _scalar(kind: type, value: Any) -> Any:
    if kind is float:
        return _number(value)
    if type(value) is not kind:
        raise ValueError(_NEEDED[kind])
    if type(value) is int and value.bit_length() > MAX_BITS:
        raise ValueError(_TOO_LARGE)
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(_NEEDED[float])
    try:
        # YAML 1.1 reads 6e-4, without a point, as text.
        return float(value)
    except ValueError:
        raise ValueError(_NEEDED[float]) from None
    except OverflowError:
        raise ValueError(_TOO_LARGE) from None
