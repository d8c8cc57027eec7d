"""Downloads of one file at the same time: one brings it, the others take it, and nobody spoils another's bytes."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from orchestrator.connection import Connection
from orchestrator.container import Container
from orchestrator.errors import RemoteError
from orchestrator.inventory import Destination
from orchestrator.partial import only_writer

MEGABYTE = 1_000_000


class Downloads:
    """Several downloads of one file to one place, each over a connection of its own."""

    def __init__(self, destination: Destination, path: Path, home: Path, sha256: str) -> None:
        self._destination, self._path, self._home, self._sha256 = destination, path, home, sha256
        self.waited: list[str] = []
        self.fetched_bytes: list[int] = []

    def run(self, count: int) -> Sequence[Future[None]]:
        together = threading.Barrier(count)
        with ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(self._one, together) for _ in range(count)]
            wait(futures, timeout=60)
        return futures

    def _one(self, together: threading.Barrier) -> None:
        seen = [0]
        with Connection("local", self._destination.host, self.waited.append) as connection:
            connection.open()
            together.wait(30)
            try:
                Container(connection, self._destination).download(
                    str(self._path),
                    self._home,
                    size=8 * MEGABYTE,
                    sha256=self._sha256,
                    on_progress=lambda done, _: seen.append(done),
                )
            finally:
                self.fetched_bytes.append(seen[-1])


def test_one_of_many_downloads_brings_the_file_and_the_others_take_it(
    destination: Destination, folder: Path, tmp_path: Path
) -> None:
    data = os.urandom(8 * MEGABYTE)
    (folder / "file").write_bytes(data)
    downloads = Downloads(destination, folder / "file", tmp_path / "home", hashlib.sha256(data).hexdigest())
    for done in downloads.run(4):
        done.result()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert (tmp_path / "home").read_bytes() == data
    assert sorted(downloads.fetched_bytes) == [0, 0, 0, 8 * MEGABYTE]
    assert any("Another download brings home" in told for told in downloads.waited)


def test_each_of_many_downloads_of_what_is_damaged_says_so_for_itself(
    destination: Destination, folder: Path, tmp_path: Path
) -> None:
    (folder / "file").write_bytes(os.urandom(8 * MEGABYTE))
    downloads = Downloads(destination, folder / "file", tmp_path / "home", "0" * 64)
    for done in downloads.run(3):
        assert isinstance(done.exception(), RemoteError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ["put in place", "removed", "left"])
def test_who_waited_for_a_partial_file_gets_the_one_that_is_there_then(tmp_path: Path, end: str) -> None:
    partial = tmp_path / "new folder" / "file.part"
    waiting = threading.Event()
    got: list[bytes] = []

    def second() -> None:
        with only_writer(partial, waiting.set) as file:
            file.write(b"second")
            file.flush()
            got.append(partial.read_bytes())

    thread = threading.Thread(target=second)
    with only_writer(partial, lambda: None) as file:
        file.write(b"first ")
        file.flush()
        thread.start()
        assert waiting.wait(10)
        time.sleep(0.2)
        assert got == []
        if end == "put in place":
            partial.replace(tmp_path / "file")
        elif end == "removed":
            partial.unlink()
    thread.join(10)
    assert got == [b"first second" if end == "left" else b"second"]
