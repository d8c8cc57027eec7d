"""Plain values with where they stand, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from payload.errors import PayloadError

MAX_DEPTH = 16
"""Of mappings and lists in each other; a recipe needs three, an inventory six."""
MAX_BITS = 63
MOST_FAULTS = 20
"""That one message names."""
_SHOWN = 80
"""Characters of a value in a message."""


@dataclass(frozen=True)
class Located:
    """A plain value with where it stands: a file and its line, or, without a line, what else it came from.

    Mappings (``dict[str, Located]``) and lists hold further ``Located``.
    """

    value: Any
    source: str
    line: int = 0

    @property
    def where(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True)
class Fault:
    """What is wrong with one value. ``name`` is its dotted path, ``hint`` what may help."""

    item: Located
    name: str
    problem: str
    hint: str = ""

    def __str__(self) -> str:
        name = self.name if len(self.name) <= _SHOWN else f"{self.name[:_SHOWN]}…"
        return f"{self.item.where}: {f'{name}: ' if name else ''}{self.problem}."


def refuse(faults: Iterable[Fault]) -> None:
    """Raises ``PayloadError`` (kind usage) that tells all faults, if there are any, in the order of their lines.

    Of one value, whatever takes it over, only the first fault is told.
    """
    by_item: dict[int, Fault] = {}
    for fault in faults:
        by_item.setdefault(id(fault.item), fault)
    if not by_item:
        return
    told = sorted(by_item.values(), key=lambda fault: fault.item.line)
    more = len(told) - MOST_FAULTS
    hint = f"And {more} more faults." if more > 0 else next((fault.hint for fault in told if fault.hint), "")
    raise PayloadError("\n".join(map(str, told[:MOST_FAULTS])), hint=hint, kind="usage")


def locate(value: Any, source: str, depth: int = 0) -> Located:
    """Plain JSON-like data as what came from ``source``.

    Raises ``PayloadError`` (kind usage) where it is nested more than ``MAX_DEPTH`` deep.
    """
    if depth > MAX_DEPTH:
        raise PayloadError(f"{source[:_SHOWN]}: nested more than {MAX_DEPTH} deep.", kind="usage")
    if isinstance(value, dict):
        return Located({key: locate(item, source, depth + 1) for key, item in value.items()}, source)
    if isinstance(value, list | tuple):
        return Located([locate(item, source, depth + 1) for item in value], source)
    return Located(value, source)


def shown(value: Any) -> str:
    """A value in a message, as Python writes it but never long; what is nested further is left out."""
    if _has_many_digits(value):
        return "one of many digits"
    if isinstance(value, list):
        value = [_brief(part) for part in value]
    elif isinstance(value, dict):
        value = {key: _brief(part) for key, part in value.items()}
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _brief(part: Any) -> Any:
    return ... if isinstance(part, list | dict) or _has_many_digits(part) else part


def _has_many_digits(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() > MAX_BITS
