"""A release is named by its content, arrives whole or not at all, and the old one stays current until then."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from payload.agent.release import build_archive, tree_hash
from payload.errors import PayloadError
from tests.payload.agent.container import FakeContainer, make_payload, upload

NAMES = st.text("abc._-é ", min_size=1, max_size=6).filter(
    lambda name: name[0] != "." and not name.endswith(".pyc")
)
TREES = st.dictionaries(NAMES, st.tuples(st.binary(max_size=20), st.booleans()), min_size=1, max_size=5)


def write_tree(folder: Path, tree: dict[str, tuple[bytes, bool]]) -> Path:
    for name, (content, executable) in tree.items():
        path = folder / "sub" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if executable else 0o644)
    return folder


def hash_as_documented(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(
        (p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.relative_to(folder).as_posix()
    ):
        flag = "x" if os.access(path, os.X_OK) and path.stat().st_mode & 0o100 else "-"
        line = (
            f"{flag} {hashlib.sha256(path.read_bytes()).hexdigest()} {path.relative_to(folder).as_posix()}\0"
        )
        digest.update(line.encode())
    return digest.hexdigest()[:16]


@given(TREES)
@settings(max_examples=40, deadline=None)
def test_the_name_is_the_documented_hash(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    folder = write_tree(tmp_path_factory.mktemp("tree"), tree)
    assert tree_hash(folder) == hash_as_documented(folder)


@given(TREES, TREES)
@settings(max_examples=40, deadline=None)
def test_two_trees_have_one_name_only_if_they_are_equal(
    tmp_path_factory: pytest.TempPathFactory, first: Any, second: Any
) -> None:
    folder = tmp_path_factory.mktemp("trees")
    names = [tree_hash(write_tree(folder / str(number), tree)) for number, tree in enumerate((first, second))]
    assert (names[0] == names[1]) == (first == second)


def test_caches_and_hidden_files_are_no_part_of_a_release(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "tree", {"a.py": (b"x", False)})
    name = tree_hash(folder)
    (folder / "sub/__pycache__").mkdir()
    (folder / "sub/__pycache__/a.cpython-311.pyc").write_bytes(b"y")
    (folder / "sub/.DS_Store").write_bytes(b"z")
    assert tree_hash(folder) == name


def test_a_symbolic_link_in_a_release_is_refused(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "tree", {"a.py": (b"x", False)})
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(PayloadError, match="link"):
        tree_hash(folder)


def test_the_same_tree_gives_the_same_archive(tmp_path: Path) -> None:
    tree = make_payload(tmp_path)
    first = build_archive(tree, tmp_path / "1.zip")
    (tree / "errors.py").touch()
    assert build_archive(tree, tmp_path / "2.zip") == first
    assert first[0] == tree_hash(tree)


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """Another payload tree than the one that is deployed."""
    tree = make_payload(tmp_path / "newer")
    (tree / "new.py").write_text("x = 1\n")
    script = tree / "run.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    return tree


def is_untouched(container: FakeContainer) -> bool:
    names = sorted(path.name for path in (container.root / "releases").iterdir())
    current = (container.root / "current").resolve().name
    return names == [container.release] and current == container.release and not any_upload(container)


def any_upload(container: FakeContainer) -> list[Path]:
    return list((container.root / "incoming").iterdir())


def test_an_uploaded_archive_puts_itself_in_place(container: FakeContainer, newer: Path) -> None:
    archive, fields = upload(container, newer)
    reply = container.ask("receive", program=archive, **fields)
    assert reply.result is not None
    assert not reply.result["already"]
    placed = container.root / "releases" / fields["release"] / "payload"
    assert tree_hash(placed) == fields["release"]
    assert (placed / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (placed / "new.py").stat().st_mode & 0o777 == 0o644
    assert (container.root / "current").resolve() == placed.parent
    assert not any_upload(container)
    container.release = fields["release"]
    assert container.result("hello", release=fields["release"])["protocol"] == 1


def test_a_release_that_is_there_is_not_unpacked_again(container: FakeContainer, newer: Path) -> None:
    archive, fields = upload(container, newer)
    container.ask("receive", program=archive, **fields)
    inode = (container.root / "releases" / fields["release"]).stat().st_ino
    archive, fields = upload(container, newer)
    reply = container.ask("receive", program=archive, **fields)
    assert reply.result is not None
    assert reply.result["already"]
    assert (container.root / "releases" / fields["release"]).stat().st_ino == inode


def test_a_damaged_release_is_noticed_and_replaced(container: FakeContainer, newer: Path) -> None:
    archive, fields = upload(container, newer)
    container.ask("receive", program=archive, **fields)
    (container.root / "releases" / fields["release"] / "payload/new.py").write_text("x = 2\n")
    container.release = fields["release"]
    assert "damaged" in container.error("hello", release=fields["release"])["message"]
    archive, fields = upload(container, newer)
    reply = container.ask("receive", program=archive, **fields)
    assert reply.result is not None
    assert not reply.result["already"]
    assert container.result("hello", release=fields["release"])["release"] == fields["release"]


def test_the_agent_writes_nothing_beside_it_and_the_release_stays_what_its_name_says(
    container: FakeContainer,
) -> None:
    folder = container.root / "releases"
    before = set(folder.rglob("*"))
    container.result("status")
    container.result("facts")
    assert set(folder.rglob("*")) == before
    assert container.result("hello")["release"] == container.release


def test_a_release_is_put_in_place_with_its_agents_bytecode_and_one_that_is_cut_off_is_mended(
    container: FakeContainer, newer: Path
) -> None:
    archive, fields = upload(container, newer)
    container.ask("receive", program=archive, **fields)
    agent = container.root / "releases" / fields["release"] / "payload" / "agent"
    [compiled] = (agent / "__pycache__").glob("main.*.pyc")
    whole = compiled.read_bytes()
    # What a full disk leaves when Python writes it: no call would start any more.
    compiled.write_bytes(whole[:-100])
    archive, fields = upload(container, newer)
    reply = container.ask("receive", program=archive, **fields)
    assert reply.result is not None
    assert reply.result["already"]
    assert compiled.read_bytes()[16:] == whole[16:]


def test_hello_can_make_a_release_current_again(container: FakeContainer, newer: Path) -> None:
    archive, fields = upload(container, newer)
    container.ask("receive", program=archive, **fields)
    assert (container.root / "current").resolve().name == fields["release"]
    container.result("hello", release=container.release)
    assert (container.root / "current").resolve().name == fields["release"]
    container.result("hello", release=container.release, activate=True)
    assert (container.root / "current").resolve().name == container.release


def test_a_truncated_archive_changes_nothing(container: FakeContainer, newer: Path) -> None:
    archive, fields = upload(container, newer)
    archive.write_bytes(archive.read_bytes()[:-1000])
    error = container.error("receive", archive=archive.name, **fields)
    assert f"instead of {fields['size']}" in error["message"]
    assert is_untouched(container)


def test_an_archive_with_another_hash_changes_nothing(container: FakeContainer, newer: Path) -> None:
    archive, fields = upload(container, newer)
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    assert "SHA-256" in container.error("receive", archive=archive.name, **fields)["message"]
    assert is_untouched(container)


def test_an_archive_of_another_release_changes_nothing(container: FakeContainer, newer: Path) -> None:
    archive, fields = upload(container, newer)
    error = container.error("receive", archive=archive.name, **{**fields, "release": "f" * 16})
    assert fields["release"] in error["message"]
    assert is_untouched(container)


@pytest.mark.parametrize(
    "name", ["../escape.py", "/tmp/escape.py", "payload/../../escape.py", "other/file.py"]
)
def test_an_archive_cannot_write_outside_its_release(
    container: FakeContainer, tmp_path: Path, name: str
) -> None:
    archive = container.root / "incoming" / "hostile.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr(name, "x")
    data = archive.read_bytes()
    error = container.error(
        "receive",
        archive=archive.name,
        release="f" * 16,
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
    )
    assert "does not belong there" in error["message"]
    assert is_untouched(container)
    assert not list(tmp_path.rglob("escape.py"))


def test_leftovers_of_an_interrupted_unpacking_are_removed(container: FakeContainer, newer: Path) -> None:
    leftover = container.root / "releases" / ".0123456789abcdef.beef"
    (leftover / "payload").mkdir(parents=True)
    archive, fields = upload(container, newer)
    assert container.ask("receive", program=archive, **fields).result is not None
    assert not leftover.exists()


def test_two_receives_at_once_both_end_well(container: FakeContainer, newer: Path) -> None:
    uploads = [upload(container, newer, f"{number}.zip") for number in range(4)]
    asked = [container.open("receive", archive=archive.name, **fields) for archive, fields in uploads]
    answers = [process.communicate(timeout=60)[0] for process in asked]
    assert all(b'"result"' in answer for answer in answers), answers
    assert sum(b'"already": false' in answer for answer in answers) == 1
    assert sorted(path.name for path in (container.root / "releases").iterdir()) == sorted(
        [container.release, uploads[0][1]["release"]]
    )


@pytest.fixture
def small_disk(container: FakeContainer) -> Iterator[FakeContainer]:
    """The container's releases on a file system of their own that has little room."""
    releases = container.root / "releases"
    moved = releases.with_name("releases.moved")
    releases.rename(moved)
    releases.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(releases)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    shutil.copytree(moved / container.release, releases / container.release)
    yield container
    subprocess.run(["umount", str(releases)], check=True)


@pytest.mark.parametrize("told_by", ["the size in the archive", "the disk itself"])
def test_a_full_disk_leaves_the_old_release_current(
    small_disk: FakeContainer, newer: Path, tmp_path: Path, told_by: str
) -> None:
    (newer / "big.bin").write_bytes(os.urandom(1 << 20))
    archive, fields = upload(small_disk, newer)
    if told_by == "the disk itself":
        # The directory of the archive understates the size, so that only writing tells.
        with zipfile.ZipFile(archive) as packed:
            size = packed.getinfo("payload/big.bin").file_size
        data = archive.read_bytes()
        archive.write_bytes(data.replace(size.to_bytes(4, "little"), (1000).to_bytes(4, "little")))
        (small_disk.root / "releases/ballast").write_bytes(bytes(400_000))
        fields |= {"sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}
    error = small_disk.error("receive", archive=archive.name, **fields)
    if told_by == "the size in the archive":
        assert "disk is full" in error["message"]
    assert sorted(p.name for p in (small_disk.root / "releases").iterdir() if p.name != "ballast") == [
        small_disk.release
    ]
    assert small_disk.result("hello", release=small_disk.release)
    assert not any_upload(small_disk)
