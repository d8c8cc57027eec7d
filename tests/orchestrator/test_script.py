"""`orchestrator script`: a file of the desk runs in the container as it is."""

from __future__ import annotations

import os
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


def test_what_is_no_regular_file_is_refused_at_once(local_node: NodeInfo, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        done = orchestrator("script", *PLACE, str(file), inventory=local_node.inventory, timeout_s=20)
        assert_one_paragraph(done, 2, "not a regular file", "Write the script to a file first")


def test_a_script_that_is_too_large_is_refused(local_node: NodeInfo, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(5 << 20)
    done = orchestrator("script", *PLACE, str(tmp_path / "large"), inventory=local_node.inventory)
    assert_one_paragraph(done, 2, "more than 4 MiB")


def test_a_line_of_more_than_eight_mebibytes_comes_home(local_node: NodeInfo, tmp_path: Path) -> None:
    assert orchestrator("deploy", *PLACE, inventory=local_node.inventory).returncode == 0
    file = write(tmp_path / "long", "#!/usr/bin/env python3\nprint('x' * 9_000_000)\n")
    done = orchestrator("script", *PLACE, file, inventory=local_node.inventory)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "x" * 9_000_000 + "\n"


def test_a_missing_interpreter_is_said_once(local_node: NodeInfo, tmp_path: Path) -> None:
    assert orchestrator("deploy", *PLACE, inventory=local_node.inventory).returncode == 0
    file = write(tmp_path / "probe", "#!/no/such/interpreter\n")
    done = orchestrator("script", *PLACE, file, inventory=local_node.inventory)
    assert_one_paragraph(done, 2, "'/no/such/interpreter', which is not in the container")
    assert done.stderr.count("/no/such/interpreter") == 1
