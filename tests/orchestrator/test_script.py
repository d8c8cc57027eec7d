"""`orchestrator script`: a file of the desk runs in the container as it is."""

from __future__ import annotations

from pathlib import Path

from orchestrator.localnode.node import NodeInfo
from tests.orchestrator.test_cli import assert_one_paragraph, orchestrator

PLACE = ("--host", "local", "--ct", "200")


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_its_output_its_arguments_and_its_failure_come_home(local_node: NodeInfo, tmp_path: Path) -> None:
    assert orchestrator("deploy", *PLACE, inventory=local_node.inventory).returncode == 0
    program = (
        "#!/usr/bin/env python3\nimport sys\nprint(sys.argv[1:])\nprint('oh', file=sys.stderr)\nsys.exit(3)\n"
    )
    file = write(tmp_path / "a 'probe'.py", program)
    done = orchestrator("script", *PLACE, "--", file, "-x", "a b", "$HOME", inventory=local_node.inventory)
    assert done.stdout == "['-x', 'a b', '$HOME']\n"
    assert done.stderr.startswith("oh\n")
    assert_one_paragraph(done, 1, "ended with exit status 3 in container 200 on local")
    quiet = write(tmp_path / "quiet", "#!/bin/sh\nexit 0\n")
    assert orchestrator("script", *PLACE, quiet, inventory=local_node.inventory).returncode == 0


def test_a_file_that_is_not_there_is_a_usage_error(local_node: NodeInfo, tmp_path: Path) -> None:
    done = orchestrator("script", *PLACE, str(tmp_path / "none"), inventory=local_node.inventory)
    assert_one_paragraph(done, 2, "cannot be read", "No such file")
