"""What a dataclass can ask of a YAML file, and how each kind of misfit is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from payload.errors import PayloadError
from payload.located import Fault
from payload.yaml_binding import Shorthand, at_least, at_most, bind, require
from payload.yaml_reading import read_yaml


def _letters(value: object) -> tuple[str, ...]:
    if not isinstance(value, str):
        raise ValueError("letters are needed")
    return tuple(value)


@dataclass(frozen=True)
class Part:
    size: Annotated[int, at_least(1), at_most(9)]
    letters: Annotated[tuple[str, ...], Shorthand(_letters), require(len, "at least one letter")] = ("a",)


def _fits(part: Part) -> Part:
    if part.size < len(part.letters):
        raise ValueError("more letters than its size")
    return part


@dataclass(frozen=True)
class Whole:
    parts: dict[Annotated[str, require(str.islower, "a small letter")], Annotated[Part, _fits]]
    kind: Literal["on", "off"] = "off"
    share: float | None = None


def whole(folder: Path, text: str) -> Whole:
    path = folder / "whole.yaml"
    path.write_text(text)
    faults: list[Fault] = []
    return bind(Whole, read_yaml(path, faults), faults)


def test_a_mapping_becomes_the_dataclass_with_its_parts(tmp_path: Path) -> None:
    text = "kind: on\nshare: 6e-4\nparts:\n  x: {size: 2, letters: ab}\n  y: {size: 3, letters: [a, b]}\n"
    assert whole(tmp_path, text) == Whole(
        kind="on", share=6e-4, parts={"x": Part(2, ("a", "b")), "y": Part(3, ("a", "b"))}
    )


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ("{x: {size: 0}}", "parts.x.size: the number is too small"),
        ("{x: {size: 10}}", "parts.x.size: the number is too large"),
        ("{x: {size: 1.0}}", "parts.x.size: a whole number is needed"),
        ("{x: {size: yes}}", "parts.x.size: a whole number is needed"),
        ("{x: {}}", "parts.x.size: is missing"),
        ("{x: 5}", "parts.x: a mapping is needed"),
        ("[x]", "parts: a mapping is needed"),
        ("{X: {size: 1}}", "parts.X: a small letter"),
        ("{x: {size: 1, letters: 5}}", "parts.x.letters: letters are needed"),
        ("{x: {size: 1, letters: [a, 5]}}", "parts.x.letters.1: text is needed (quote it)"),
        ("{x: {size: 1, letters: {}}}", "parts.x.letters: a list is needed"),
        ("{x: {size: 1, letters: []}}", "parts.x.letters: at least one letter"),
        ("{x: {size: 1, letters: ab}}", "parts.x: more letters than its size"),
        ("{}\nkind: maybe", "kind: one of on, off is needed"),
        ("{}\nshare: half", "share: a number is needed"),
        ("{}\nshare: yes", "share: a number is needed"),
        (f"{{}}\nshare: 1{'0' * 400}", "share: the number is too large"),
    ],
)
def test_a_misfit_is_told_alone_with_its_place(tmp_path: Path, parts: str, says: str) -> None:
    with pytest.raises(PayloadError) as caught:
        whole(tmp_path, f"parts: {parts}\n")
    line = 2 if "\n" in parts else 1
    assert caught.value.message == f"{tmp_path / 'whole.yaml'}:{line}: {says}."
    assert caught.value.kind == "usage"
