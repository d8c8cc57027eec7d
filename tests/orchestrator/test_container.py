"""One container: commands see exactly their argv and the inventory's environment; files arrive whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import random
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.connection import Connection
from orchestrator.container import Container
from orchestrator.errors import RemoteError, TransportError, UsageError
from orchestrator.inventory import Destination
from orchestrator.localnode.node import NodeInfo
from payload.agent.layout import PARTIAL_PREFIX

from .test_connection import ECHO_ARGUMENTS, arguments


@pytest.fixture(scope="module")
def shared(destination: Destination) -> Container:
    return Container(Connection("local", destination.host), destination)


@settings(max_examples=30, deadline=None)
@given(st.lists(arguments, max_size=5))
def test_any_argv_arrives_byte_exact_through_pct_exec(shared: Container, argv: list[bytes]) -> None:
    done = shared.run([sys.executable, "-S", "-c", ECHO_ARGUMENTS, *argv])
    assert done.exit_status == 0, done.stderr
    assert [bytes(argument) for argument in json.loads(done.stdout)] == argv


def test_a_command_sees_the_inventorys_path_home_and_lang_and_nothing_of_the_host(
    container: Container,
) -> None:
    lines = container.run(["env"]).stdout.decode().splitlines()
    environment = dict(line.split("=", 1) for line in lines)
    assert environment["PATH"] == ":".join(container.settings.path)
    assert environment["LANG"] == "C.UTF-8"
    assert environment["HOME"] == container.settings.home
    assert set(environment) <= {"PATH", "LANG", "HOME", "PWD", "SHLVL", "_"}


@settings(max_examples=15, deadline=None)
@given(
    data=st.binary(max_size=200_000),
    name=st.sampled_from(["plain", "with space", "quote'", "-dash", "ünï", "$x", "new\nline"]),
)
def test_any_file_arrives_byte_exact_under_any_name(shared: Container, data: bytes, name: str) -> None:
    path = Path(shared.settings.root) / "tests" / "any" / name
    shared.upload(data, str(path), mode=0o640)
    assert path.read_bytes() == data
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert not [left for left in path.parent.iterdir() if left.name.startswith(PARTIAL_PREFIX)]


def test_a_hundred_megabytes_go_there_and_come_back(
    container: Container, folder: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    block = random.Random(0).randbytes(1_000_000)
    with source.open("wb") as file:
        for number in range(100):
            file.write(number.to_bytes(4, "big") + block[4:])
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    seen: list[int] = []
    container.upload(source, str(folder / "big"), on_progress=lambda done, total: seen.append(done))
    assert container.sha256(str(folder / "big")) == digest
    assert seen[-1] == 100_000_000
    container.download(str(folder / "big"), tmp_path / "back", size=100_000_000, sha256=digest)
    assert hashlib.sha256((tmp_path / "back").read_bytes()).hexdigest() == digest
    (folder / "big").unlink()


def test_an_upload_replaces_a_file_by_rename(container: Container, folder: Path) -> None:
    container.upload(b"old", str(folder / "file"))
    with (folder / "file").open("rb") as reader:
        container.upload(b"new and longer", str(folder / "file"))
        assert reader.read() == b"old"
    assert (folder / "file").read_bytes() == b"new and longer"


def test_the_hashes_of_many_files_come_by_one_command_without_those_that_are_not_there(
    container: Container, folder: Path
) -> None:
    names = ["a", "b c", "d\\e", "f\ng", "é"]
    for name in names:
        container.upload(name.encode(), str(folder / name))
    found = container.sha256_in(str(folder), [*names, "missing"])
    assert found == {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    assert container.sha256_in(str(folder / "no-folder"), ["a"]) == {}


def test_what_arrives_is_as_old_as_its_arrival_so_that_prune_does_not_take_it_for_a_leftover(
    container: Container, folder: Path
) -> None:
    began = time.time()
    container.upload(b"bytes", str(folder / "uploaded"))
    container.send(b"bytes", str(folder / "sent"))
    assert all((folder / name).stat().st_mtime > began - 5 for name in ("uploaded", "sent"))


def test_an_upload_over_a_folder_is_refused_and_leaves_nothing(container: Container, folder: Path) -> None:
    (folder / "taken" / "inside").mkdir(parents=True)
    with pytest.raises(RemoteError, match="could not be put in place"):
        container.upload(b"data", str(folder / "taken"))
    assert [path.name for path in folder.iterdir()] == ["taken"]


def test_an_upload_into_a_file_as_folder_is_refused_and_leaves_nothing(
    container: Container, folder: Path
) -> None:
    (folder / "file").write_bytes(b"x")
    with pytest.raises(RemoteError, match="did not arrive whole"):
        container.upload(b"data", str(folder / "file" / "below"))
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_source_that_shrinks_while_it_is_sent_never_becomes_a_file(
    container: Container, folder: Path, tmp_path: Path
) -> None:
    source = tmp_path / "shrinking"
    source.write_bytes(bytes(3_000_000))

    def shrink(done: int, total: int) -> None:
        os.truncate(source, 1_000_000)

    with pytest.raises(UsageError, match="became shorter"):
        container.upload(source, str(folder / "never"), on_progress=shrink)
    assert list(folder.iterdir()) == []


def test_a_download_goes_on_where_the_last_one_stopped(
    container: Container, folder: Path, tmp_path: Path
) -> None:
    data = random.Random(1).randbytes(500_000)
    (folder / "file").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    partial = tmp_path / f"home.{digest[:16]}.part"
    partial.write_bytes(data[:300_000])
    seen: list[int] = []
    container.download(
        str(folder / "file"),
        tmp_path / "home",
        size=len(data),
        sha256=digest,
        on_progress=lambda done, _: seen.append(done),
    )
    assert (tmp_path / "home").read_bytes() == data
    assert seen[0] > 300_000
    assert not partial.exists()


def test_a_download_whose_bytes_are_not_those_listed_leaves_no_file(
    container: Container, folder: Path, tmp_path: Path
) -> None:
    (folder / "file").write_bytes(b"other bytes")
    with pytest.raises(RemoteError, match="did not come home whole"):
        container.download(str(folder / "file"), tmp_path / "home", size=11, sha256="0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_a_download_of_a_file_that_is_gone_leaves_no_file(
    container: Container, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(RemoteError, match="could not be read"):
        container.download(str(folder / "none"), tmp_path / "home", size=5, sha256="0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_a_desk_that_cannot_write_is_told_so_and_the_link_is_not_blamed(
    container: Container, folder: Path, tmp_path: Path
) -> None:
    (folder / "file").write_bytes(b"data")
    (tmp_path / "taken").write_bytes(b"a file where a folder is needed")
    with pytest.raises(UsageError, match="cannot be written at the desk"):
        container.download(str(folder / "file"), tmp_path / "taken" / "home", size=4, sha256="0" * 64)


def other(destination: Destination, **changes: object) -> Destination:
    return replace(destination, **changes)


def test_a_stopped_container_is_named_with_the_command_that_starts_it(
    local_node: NodeInfo, connection: Connection, destination: Destination
) -> None:
    assert connection.run([str(local_node.pct), "stop", "200"]).exit_status == 0
    try:
        container = Container(connection, destination)
        with pytest.raises(TransportError, match="container 200 on local is stopped") as raised:
            raise container.explain(container.run(["true"]), "it did nothing")
        assert raised.value.hint == "Start it on the host: pct start 200"
    finally:
        assert connection.run([str(local_node.pct), "start", "200"]).exit_status == 0


def test_a_container_that_is_not_there_is_named(connection: Connection, destination: Destination) -> None:
    container = Container(connection, other(destination, container_id="999"))
    with pytest.raises(TransportError, match="local has no container 999"):
        raise container.explain(container.run(["true"]), "it did nothing")


def test_a_host_without_pct_is_named(connection: Connection, destination: Destination) -> None:
    host = replace(destination.host, pct="/usr/sbin/no-pct")
    container = Container(connection, other(destination, host=host))
    with pytest.raises(TransportError, match="local has no /usr/sbin/no-pct") as raised:
        raise container.explain(container.run(["true"]), "it did nothing")
    assert "Proxmox" in raised.value.hint


def test_what_is_sent_for_a_reader_that_checks_it_is_one_file_of_the_mode_asked_for(
    container: Container, folder: Path
) -> None:
    container.send(b"\0whole\n", str(folder / "sent"), mode=0o600)
    assert (folder / "sent").read_bytes() == b"\0whole\n"
    assert (folder / "sent").stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_sent_is_an_error_in_words(container: Container, folder: Path) -> None:
    (folder / "file").write_text("in the way")
    with pytest.raises(RemoteError, match="did not arrive whole"):
        container.send(b"x", str(folder / "file" / "sent"))


def test_the_configuration_is_what_pct_says_and_nothing_for_a_container_that_is_not_there(
    container: Container,
) -> None:
    config = container.configuration()
    assert config is not None
    assert config["unprivileged"] == "1"
    container.destination = replace(container.destination, container_id="999")
    assert container.configuration() is None


def test_what_is_no_regular_file_has_no_hash_and_keeps_nobody_waiting(
    container: Container, folder: Path
) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "file").write_bytes(b"x")
    began = time.monotonic()
    assert container.sha256(str(folder / "pipe")) is None
    assert container.sha256(str(folder / "zero")) is None
    assert container.sha256(str(folder)) is None
    assert list(container.sha256_in(str(folder), ["pipe", "zero", "file"])) == ["file"]
    assert time.monotonic() - began < 10
