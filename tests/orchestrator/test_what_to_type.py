"""What is missing or misspelt is named in make's words, and each message says what to type."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from orchestrator.cli_options import open_container
from orchestrator.console import Console
from orchestrator.container import Container
from orchestrator.localnode.node import NodeInfo
from orchestrator.status import show_status
from payload.agent.layout import Layout
from payload.agent.locks import hold
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


def test_the_commands_that_an_agent_suggests_name_its_container(
    local_node: NodeInfo, container: Container
) -> None:
    with hold(Layout.at(container.settings.root), "venv", "venv", "ann@desk"):
        done = orchestrator("prune", *PLACE, inventory=local_node.inventory)
    command = f"make locks HOST=local CT=200 INVENTORY={local_node.inventory} BREAK=venv ends that process"
    assert_one_paragraph(done, 4, "held by ann@desk", command)


def test_a_lost_run_is_told_with_the_commands_that_end_it_and_go_on_from_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lost = {"run_id": "r1", "state": "lost"}
    show_status(Console(), {"runs": [{**lost, "left": [1]}, lost]}, "HOST=h CT=200")
    said = capfd.readouterr().err
    assert "make stop RUN_ID=r1 HOST=h CT=200" in said
    assert "make train RESUME=r1 HOST=h CT=200" in said


def test_a_place_below_a_file_is_refused_in_words(
    local_node: NodeInfo, container: Container, tmp_path: Path
) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.jsonl").write_text("{}")
    rows = Path(container.settings.root) / "below/rows.jsonl"
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.write_text("{}")
    for source, to in (("rows/a.jsonl", "a.jsonl"), ("rows/a.jsonl", "deep/a.jsonl"), ("rows", "deep")):
        put = ("put", *PLACE, "--to", f"below/rows.jsonl/{to}", str(tmp_path / source))
        done = orchestrator(*put, inventory=local_node.inventory)
        assert_one_paragraph(done, 2, f"below/rows.jsonl/{to}", "leads through a file", "TO=")
        assert "tar" not in done.stderr
    assert rows.read_text() == "{}"
