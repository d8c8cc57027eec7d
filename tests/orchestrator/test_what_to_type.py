"""What is missing or misspelt is named in make's words, and each message says what to type."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from orchestrator.cli_options import open_container
from orchestrator.console import Console
from orchestrator.localnode.node import NodeInfo
from tests.orchestrator.test_cli import assert_one_paragraph, orchestrator

PLACE = ("--host", "local", "--ct", "200")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("put", "--to", "data/x"), ("No file is named", "FILE=")),
        (("put", "/etc/hostname"), ("Where /etc/hostname goes is not said", "TO=data/train.jsonl")),
        (("script",), ("No file is named", "FILE=probe.py")),
        (("cache", "foo"), ("no action 'foo'", "ACTION= is one of list, show, verify, prune")),
    ],
)
def test_what_is_missing_is_named_as_make_names_it(
    local_node: NodeInfo, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_one_paragraph(orchestrator(*arguments, *PLACE, inventory=local_node.inventory), 2, *words)


def test_a_script_with_windows_line_ends_is_refused_with_how_to_mend_it(
    local_node: NodeInfo, tmp_path: Path
) -> None:
    file = tmp_path / "it's.py"
    file.write_bytes(b"#!/usr/bin/env python3\r\nprint(1)\r\n")
    done = orchestrator("script", *PLACE, str(file), inventory=local_node.inventory)
    assert_one_paragraph(done, 2, "Windows line ends", "sed -i 's/\\r$//'")
    file.write_bytes(b"#!/bin/sh\n# unix, but for\r\n")
    assert orchestrator("script", *PLACE, str(file), inventory=local_node.inventory).returncode != 2


def test_an_interruption_names_the_command_that_shows_what_goes_on(
    local_node: NodeInfo, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), open_container(Console(), "local", "200", local_node.inventory):
        raise KeyboardInterrupt
    assert f"Look: make locks HOST=local CT=200 INVENTORY={local_node.inventory}" in capfd.readouterr().err
