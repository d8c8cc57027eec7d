"""A container that does not answer, as one whose init is stopped, keeps nobody waiting: every command has an end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import remote_files
from orchestrator.connection import Connection
from orchestrator.console import Console
from orchestrator.container import Container
from orchestrator.errors import TransportError
from orchestrator.inventory import Destination
from orchestrator.put import put
from orchestrator.recipes import recipe_of_run
from orchestrator.tar_stream import CHUNK_BYTES

PATIENCE_S = 0.5


@pytest.fixture
def frozen(connection: Connection, destination: Destination, tmp_path: Path) -> Container:
    """A container whose host's pct gets no answer from it."""
    pct = tmp_path / "pct"
    pct.write_text("#!/bin/sh\nexec sleep 30\n")
    pct.chmod(0o755)
    host = replace(destination.host, pct=str(pct))
    return Container(connection, replace(destination, host=host), patience_s=PATIENCE_S)


def put_a_file(container: Container) -> None:
    with Console().step("put") as report:
        put(container, Path(__file__), "data/rows.jsonl", report)


ASKS: dict[str, Callable[[Container], object]] = {
    "run": lambda container: container.run(["true"]),
    "send": lambda container: container.send(b"x", "/tmp/x"),
    "upload": lambda container: container.upload(bytes(20_000_000), "/tmp/x"),
    "sha256": lambda container: container.sha256("/etc/hostname", size_bytes=1),
    "sha256_in": lambda container: container.sha256_in("/etc", ["hostname"], size_bytes=1),
    "resolved": lambda container: remote_files.resolved(container, ["/tmp"]),
    "entries": lambda container: remote_files.entries(container, "/tmp", below=True),
    "hashes": lambda container: remote_files.hashes(container, ["/etc/hostname"], size_bytes=1),
    "set_executable": lambda container: remote_files.set_executable(container, ["/tmp/x"], True),
    "remove": lambda container: remote_files.remove(container, ["/tmp/x"], []),
    "recipe_of_run": lambda container: recipe_of_run(container, "r1"),
    "put": put_a_file,
}


@pytest.mark.parametrize("what", ASKS)
def test_what_is_asked_of_a_container_that_does_not_answer_is_given_up(frozen: Container, what: str) -> None:
    began = time.monotonic()
    with pytest.raises(TransportError, match="sent nothing for"):
        ASKS[what](frozen)
    assert PATIENCE_S <= time.monotonic() - began < 10


def test_an_upload_goes_on_for_as_long_as_bytes_go_out(
    connection: Connection, destination: Destination, folder: Path
) -> None:
    container = Container(connection, destination, patience_s=1.0)
    data = os.urandom(6 * CHUNK_BYTES)
    began = time.monotonic()
    container.upload(data, str(folder / "slowly"), on_progress=lambda done, total: time.sleep(0.5))
    assert time.monotonic() - began > 2.5
    assert (folder / "slowly").read_bytes() == data


def test_what_reads_a_lot_before_it_says_a_word_is_given_the_time_for_it(frozen: Container) -> None:
    assert frozen.patience_to_read(0) == PATIENCE_S
    # 100 GB from a slow disk.
    assert frozen.patience_to_read(100e9) > 3600
