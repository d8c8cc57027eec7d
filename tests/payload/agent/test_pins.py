"""What names a venv, and which pins can be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from payload.agent.pins import TorchPin, requirement_lines, venv_name
from payload.errors import PayloadError


@given(st.permutations(["a==1 ; python_version < '3.11'", "b==2", "c==3"]))
@settings(max_examples=10, deadline=None)
def test_the_name_does_not_depend_on_the_order_or_comments_of_the_lock(lines: list[str]) -> None:
    text = "\n".join(f"{line}   # why" for line in lines)
    pin = TorchPin("2.11.0")
    assert requirement_lines(text) == sorted(lines)
    assert venv_name(requirement_lines(text), pin, "3.11.7") == venv_name(sorted(lines), pin, "3.11.7")


def test_the_name_depends_on_the_lock_the_pin_and_the_python() -> None:
    names = {
        venv_name(lines, pin, python)
        for lines in ([], ["a==1"])
        for pin in (TorchPin("2.11.0"), TorchPin("2.11.0", git="70d9"), TorchPin("2.11.0", backend="cu128"))
        for python in ("3.11.7", "3.11.8")
    }
    assert len(names) == 12


@pytest.mark.parametrize(
    "fields", [{}, {"version": ""}, {"version": "2 --x"}, {"version": "2.1", "cuda": 12.8}]
)
def test_a_torch_pin_that_cannot_be_one_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PayloadError) as raised:
        TorchPin.from_request(fields)
    assert raised.value.kind == "usage"
