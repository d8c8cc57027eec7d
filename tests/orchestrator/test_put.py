"""`orchestrator put`: files of the desk below the container's root, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import UsageError
from orchestrator.inventory import load_inventory, resolve
from orchestrator.localnode.node import NodeInfo
from orchestrator.put import _place
from tests.orchestrator.test_cli import assert_one_paragraph, orchestrator

PLACE = ("--host", "local", "--ct", "200")
ROOT = "/opt/dflash"


def test_a_folder_arrives_file_by_file_and_only_what_changed_is_sent_again(
    local_node: NodeInfo, tmp_path: Path
) -> None:
    source = tmp_path / "it's a model"
    (source / "deep").mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / "deep" / "weights $1.bin").write_bytes(bytes(range(256)) * 1000)
    arguments = ("put", *PLACE, "--to", "models/mine", str(source))
    first = orchestrator(*arguments, inventory=local_node.inventory)
    assert first.returncode == 0, first.stderr
    (source / "config.json").write_text('{"a": 1}')
    again = orchestrator(*arguments, inventory=local_node.inventory)
    assert "1 file, 0.0 MB sent to models/mine; 1 were there" in again.stdout + again.stderr
    there = (
        Path(resolve(load_inventory(local_node.inventory), "local", "200", tmp_path).container.root)
        / "models"
        / "mine"
    )
    assert (there / "config.json").read_text() == '{"a": 1}'
    assert (there / "deep" / "weights $1.bin").read_bytes() == bytes(range(256)) * 1000


@pytest.mark.parametrize(
    ("to", "problem"),
    [
        ("runs/x", "belongs to the tool"),
        ("current", "belongs to the tool"),
        ("../etc/passwd", "no place below"),
        ("/etc/passwd", "not below the container's root"),
        ("", "no place below"),
    ],
)
def test_a_place_that_is_not_the_users_is_refused(to: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        _place(ROOT, to)


@given(to=st.text(alphabet="./ab\\ \0~", max_size=12))
def test_no_place_leaves_the_root(to: str) -> None:
    try:
        place = _place(ROOT, to)
    except UsageError:
        return
    assert place.is_relative_to(ROOT)
    assert ".." not in place.parts


def test_what_is_not_at_the_desk_is_a_usage_error(local_node: NodeInfo, tmp_path: Path) -> None:
    done = orchestrator(
        "put", *PLACE, "--to", "data/x", str(tmp_path / "none"), inventory=local_node.inventory
    )
    assert_one_paragraph(done, 2, "There is no file or folder", "Name one of the desk")
    (tmp_path / "empty").mkdir()
    done = orchestrator(
        "put", *PLACE, "--to", "data/x", str(tmp_path / "empty"), inventory=local_node.inventory
    )
    assert_one_paragraph(done, 2, "holds no file")


def test_what_would_be_left_out_of_a_folder_is_refused_and_a_folder_is_no_place_for_a_file(
    local_node: NodeInfo, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    assert (
        orchestrator("put", *PLACE, "--to", "m", str(source), inventory=local_node.inventory).returncode == 0
    )
    onto = orchestrator(
        "put", *PLACE, "--to", "m", str(source / "config.json"), inventory=local_node.inventory
    )
    assert_one_paragraph(onto, 2, "m is a folder in the container", "m/config.json")
    (source / "weights").symlink_to(tmp_path / "gone")
    left_out = orchestrator("put", *PLACE, "--to", "m", str(source), inventory=local_node.inventory)
    assert_one_paragraph(left_out, 2, "would be left out")


def test_no_name_is_not_the_whole_current_folder(local_node: NodeInfo) -> None:
    done = orchestrator("put", *PLACE, "--to", "data/x", "", inventory=local_node.inventory)
    assert_one_paragraph(done, 2, "No file is named", "FILE=")
