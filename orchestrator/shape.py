"""Whether a plain value, as JSON has them, is what a type says.

Types are scalars, ``X | None``, ``list[X]``, ``dict[str, X]``, ``Any`` and TypedDicts, whose further keys are let
through. In ``Annotated[X, f]``, ``f`` takes a value that is an ``X``; its ``ValueError`` tells what is wrong with it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from payload.located import MAX_BITS, shown

_Check = Callable[[Any], None]

_NAMES: dict[Any, str] = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


class Misfit(Exception):
    """What is wrong with a part of a value. ``places``: where it stands, from within."""

    def __init__(self, problem: str, *places: str) -> None:
        super().__init__(problem)
        self.places = list(places)

    def __str__(self) -> str:
        return f"{''.join(reversed(self.places)).removeprefix('.') or 'it'} {self.args[0]}"


@functools.cache
def check_of(kind: Any) -> _Check:
    """What raises :class:`Misfit` for a value that is no ``kind``. Made once: a container may have hundreds of runs."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda _: None
    if origin is Annotated:
        return _annotated(check_of(arguments[0]), arguments[1])
    if origin in (Union, types.UnionType):
        [option] = (option for option in arguments if option is not types.NoneType)
        return _optional(check_of(option))
    if origin is list:
        return _list_of(check_of(arguments[0]))
    if origin is dict:
        return _dict_of(check_of(arguments[1]))
    if kind in _NAMES:
        return functools.partial(_require_scalar, kind)
    hints = get_type_hints(kind, include_extras=True)
    return _object_of({key: (check_of(hint), key in kind.__required_keys__) for key, hint in hints.items()})


def _require(kind: type, value: object) -> None:
    if type(value) is not kind:
        raise Misfit(f"is {_NAMES[type(value)]}, not {_NAMES[kind]}")


def _require_scalar(kind: type, value: object) -> None:
    if kind is int and type(value) is float:
        raise Misfit("is no whole number")
    if not (kind is float and type(value) is int):
        _require(kind, value)
    if type(value) is int and value.bit_length() > MAX_BITS:
        raise Misfit("is a number of too many digits")


def _annotated(check: _Check, extra: Callable[[Any], object]) -> _Check:
    def checked(value: Any) -> None:
        check(value)
        try:
            extra(value)
        except ValueError as error:
            raise Misfit(f"{error}: {shown(value)}") from None

    return checked


def _optional(check: _Check) -> _Check:
    def checked(value: Any) -> None:
        if value is not None:
            check(value)

    return checked


def _list_of(check: _Check) -> _Check:
    def checked(value: Any) -> None:
        _require(list, value)
        for number, item in enumerate(value):
            try:
                check(item)
            except Misfit as misfit:
                misfit.places.append(f"[{number}]")
                raise

    return checked


def _dict_of(check: _Check) -> _Check:
    def checked(value: Any) -> None:
        _require(dict, value)
        for key, item in value.items():
            try:
                check(item)
            except Misfit as misfit:
                misfit.places.append(f"[{shown(key)}]")
                raise

    return checked


def _object_of(parts: dict[str, tuple[_Check, bool]]) -> _Check:
    def checked(value: Any) -> None:
        _require(dict, value)
        for key, (check, needed) in parts.items():
            if key in value:
                try:
                    check(value[key])
                except Misfit as misfit:
                    misfit.places.append(f".{key}")
                    raise
            elif needed:
                raise Misfit("is missing", f".{key}")

    return checked
