"""`orchestrator put`: files of the desk below the container's root, and nowhere else."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.container import Container
from orchestrator.errors import UsageError
from orchestrator.inventory import load_inventory, resolve
from orchestrator.localnode.node import NodeInfo
from orchestrator.put import _place
from payload.agent.layout import OWN, PARTIAL_PREFIX
from tests.orchestrator.test_cli import assert_one_paragraph, orchestrator
from tests.payload.agent.container import until

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
    assert "1 file, 0.0 MB sent to models/mine; 1 was there" in again.stdout + again.stderr
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
        *((name, "belongs to the tool") for name in OWN),
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


def root_of(node: NodeInfo) -> Path:
    return Path(resolve(load_inventory(node.inventory), "local", "200", node.inventory).container.root)


def put(node: NodeInfo, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return orchestrator("put", *PLACE, *map(str, arguments), inventory=node.inventory, timeout_s=30)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.json").write_text("a")
    (folder / "deep" / "b.json").write_text("b")
    return folder


def test_what_is_no_longer_at_home_is_named_and_stays_until_it_is_asked_away(
    local_node: NodeInfo, source: Path
) -> None:
    (source / "old" / "older").mkdir(parents=True)
    (source / "old" / "older" / "c.json").write_text("c")
    there = root_of(local_node) / "left"
    assert put(local_node, "--to", "left", source).returncode == 0
    shutil.rmtree(source / "old")
    (there / "kept empty").mkdir()
    (there / ".dflash-partial-0123456789abcdef").write_text("on its way from another desk")
    again = put(local_node, "--to", "left", source)
    assert again.returncode == 0
    assert (
        f"1 file below left is not in {source} and stays: old/older/c.json. Remove: DELETE=1" in again.stderr
    )
    assert (there / "old/older/c.json").read_text() == "c"
    gone = put(local_node, "--to", "left", "--delete", source)
    assert f"2 were there; 1 that was not in {source} removed" in gone.stderr
    assert sorted(path.name for path in there.iterdir()) == [
        ".dflash-partial-0123456789abcdef", "a.json", "deep", "kept empty",
    ]  # fmt: skip
    assert "stays" not in put(local_node, "--to", "left", source).stderr


def test_delete_beside_a_single_file_is_refused(local_node: NodeInfo, source: Path) -> None:
    done = put(local_node, "--to", "single/a.json", "--delete", source / "a.json")
    assert_one_paragraph(done, 2, "is a file", "--delete")


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "語" * 85])
def test_a_name_as_long_as_a_name_can_be_arrives(local_node: NodeInfo, source: Path, name: str) -> None:
    (source / name).write_text(name)
    done = put(local_node, "--to", "long", source)
    assert done.returncode == 0, done.stderr
    assert (root_of(local_node) / "long" / name).read_text() == name


def test_the_executable_bit_travels_also_where_the_content_is_there(
    local_node: NodeInfo, source: Path
) -> None:
    program = root_of(local_node) / "bin" / "a.json"
    for mode, meant in ((0o755, 0o755), (0o644, 0o644), (0o700, 0o755)):
        (source / "a.json").chmod(mode)
        done = put(local_node, "--to", "bin", source)
        assert done.returncode == 0, done.stderr
        assert stat.S_IMODE(program.stat().st_mode) == meant
    assert "; 2 were there" in done.stderr
    (source / "a.json").write_text("anew")
    assert put(local_node, "--to", "bin/a.json", source / "a.json").returncode == 0
    assert os.access(program, os.X_OK)


@pytest.mark.parametrize("link", ["linked", "linked/deep", "linked/far/deep"])
@pytest.mark.parametrize("leads_to", ["outside", "runs", "."])
def test_a_link_in_the_container_leads_no_file_out_of_the_users_places(
    local_node: NodeInfo, source: Path, tmp_path: Path, link: str, leads_to: str
) -> None:
    root = root_of(local_node)
    shutil.rmtree(root / "linked", ignore_errors=True)
    (root / "linked").unlink(missing_ok=True)
    target = tmp_path / "outside" if leads_to == "outside" else root / leads_to
    target.mkdir(exist_ok=True)
    (root / link).parent.mkdir(parents=True, exist_ok=True)
    (root / link).symlink_to(target)
    before = sorted(target.iterdir())
    to = "linked/far" if "far" in link else "linked"
    done = put(local_node, "--to", to, source)
    assert_one_paragraph(done, 2, "leads by a symbolic link to", str(target))
    file = put(local_node, "--to", f"{link}/a.json", source / "a.json")
    assert_one_paragraph(file, 2, "leads by a symbolic link to")
    assert sorted(target.iterdir()) == before
    (root / link).unlink()


def test_a_link_within_the_users_places_is_followed_and_one_in_a_files_place_is_replaced(
    local_node: NodeInfo, source: Path, tmp_path: Path
) -> None:
    root = root_of(local_node)
    (root / "disk" / "real").mkdir(parents=True)
    (root / "via").symlink_to("disk/real")
    (tmp_path / "precious").write_text("precious")
    (root / "disk/real/a.json").symlink_to(tmp_path / "precious")
    assert put(local_node, "--to", "via", source).returncode == 0
    assert (root / "disk/real/deep/b.json").read_text() == "b"
    assert (root / "disk/real/a.json").read_text() == "a"
    assert not (root / "disk/real/a.json").is_symlink()
    assert (tmp_path / "precious").read_text() == "precious"
    assert "2 were there" in put(local_node, "--to", "via", source).stderr


def test_a_pipe_or_a_folder_in_a_files_place_is_refused_before_anything_is_sent(
    local_node: NodeInfo, source: Path
) -> None:
    there = root_of(local_node) / "odd"
    there.mkdir()
    os.mkfifo(there / "a.json")
    assert_one_paragraph(put(local_node, "--to", "odd", source), 2, "odd/a.json is no regular file")
    assert_one_paragraph(put(local_node, "--to", "odd/a.json", source / "a.json"), 2, "no regular file")
    (there / "a.json").unlink()
    (there / "a.json").mkdir()
    assert_one_paragraph(put(local_node, "--to", "odd", source), 2, "odd/a.json is a folder")
    (there / "file").write_text("")
    assert_one_paragraph(put(local_node, "--to", "odd/file", source), 2, "odd/file is no folder")
    assert not (there / "deep").exists()


def test_a_pipe_or_device_of_the_desk_is_no_source(local_node: NodeInfo, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path / "pipe", Path("/dev/zero")):
        assert_one_paragraph(put(local_node, "--to", "p", source), 2, "neither a regular file nor a folder")


def test_what_an_interrupted_put_left_is_removed_by_prune(local_node: NodeInfo) -> None:
    root = root_of(local_node)
    (root / "halves" / "deep").mkdir(parents=True)
    for name in ("old", "young"):
        (root / "halves" / "deep" / f".dflash-partial-{name}").write_text("half")
    (root / "halves" / ".mine.0123456789abcdef").write_text("a file of the user's")
    os.utime(root / "halves" / "deep" / ".dflash-partial-old", (1_000_000, 1_000_000))
    done = orchestrator("prune", *PLACE, inventory=local_node.inventory)
    assert "removed 1: halves/deep/.dflash-partial-old" in done.stderr
    assert (root / "halves" / "deep" / ".dflash-partial-young").exists()
    assert (root / "halves" / ".mine.0123456789abcdef").exists()


def test_an_upload_that_is_cut_off_leaves_only_what_prune_knows(
    container: Container, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Exception):
        pass

    def cut_off(self: Container, path: str, *, size_bytes: float) -> None:
        raise Interrupted

    (tmp_path / "rows").write_text("rows")
    monkeypatch.setattr(Container, "sha256", cut_off)
    with pytest.raises(Interrupted):
        container.upload(tmp_path / "rows", str(folder / "rows"))
    assert [path.name.startswith(PARTIAL_PREFIX) for path in folder.iterdir()] == [True]


def test_a_put_that_is_interrupted_at_the_desk_leaves_nothing_half_there(
    local_node: NodeInfo, tmp_path: Path
) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2 << 30)
    there = root_of(local_node) / "interrupted"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "orchestrator.cli",
            "put",
            *PLACE,
            "--to",
            "interrupted/large",
            str(tmp_path / "large"),
        ],
        env={**os.environ, "DFLASH_INVENTORY": str(local_node.inventory)},
        stderr=subprocess.PIPE,
    )
    for _ in until(30):
        if there.is_dir() and any(path.stat().st_size > 1_000_000 for path in there.iterdir()):
            break
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    for _ in until(10):
        if not list(there.iterdir()):
            break
    assert list(there.iterdir()) == []
