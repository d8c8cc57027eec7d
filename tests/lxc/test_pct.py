"""The bed's ``pct`` has the traps of the real one: what the product must not trust is there to be met."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.lxc.bed import PRIVILEGED, Bed
from tests.lxc.lxc import Lxc


def pct(bed: Bed, *words: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [str(bed.pct), *words],
        input=stdin,
        capture_output=True,
        env={"PATH": "/usr/bin:/bin", **environment},
        timeout=30,
        check=False,
    )


def execute(bed: Bed, *argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return pct(bed, "exec", PRIVILEGED, "--", *argv, stdin=stdin)


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -9 $$"], 137),
        (["no-such-program"], 127),
        (["/etc/passwd"], 126),
    ],
)
def test_exec_ends_as_the_command_does(bed: Bed, argv: list[str], status: int) -> None:
    assert execute(bed, *argv).returncode == status


def test_exec_passes_words_and_bytes_on_as_they_are(bed: Bed) -> None:
    words = ["a b", "$HOME", "'", '"', "\\", "", "é", "--", "-x", "two\nlines"]
    printed = execute(bed, "printf", "%s\\0", *words).stdout
    assert printed.decode().split("\0")[:-1] == words
    data = bytes(range(256)) * 100
    assert execute(bed, "cat", stdin=data).stdout == data


def test_exec_takes_the_hosts_environment_along_unless_told_not_to(bed: Bed) -> None:
    kept = pct(bed, "exec", PRIVILEGED, "--", "env", LEAKED="yes").stdout.split()
    assert b"LEAKED=yes" in kept
    assert b"PATH=/sbin:/bin:/usr/sbin:/usr/bin" in kept
    cleared = pct(bed, "exec", "--keep-env=0", PRIVILEGED, "--", "env", LEAKED="yes").stdout.split()
    assert not [line for line in cleared if line.startswith((b"LEAKED", b"HOME"))]
    assert b"container=lxc" in cleared


def test_options_are_taken_from_anywhere_before_the_dashes(bed: Bed) -> None:
    assert b"Unknown option" in pct(bed, "exec", PRIVILEGED, "ls", "-la").stderr
    swallowed = pct(bed, "exec", "--keep-env", PRIVILEGED, "--", "true")
    assert swallowed.returncode == 255


def test_its_own_failures_share_statuses_with_commands(bed: Bed) -> None:
    missing = pct(bed, "exec", "999", "--", "true")
    assert (missing.returncode, missing.stderr) == (
        2,
        b"Configuration file 'nodes/bed/lxc/999.conf' does not exist\n",
    )
    assert pct(bed, "no-verb").returncode == 255


def test_status_ends_with_0_whatever_it_says(bed: Bed, lxc: Lxc) -> None:
    assert pct(bed, "status", PRIVILEGED).stdout == b"status: running\n"
    assert b"unprivileged: 0" in pct(bed, "config", PRIVILEGED).stdout
    lxc.kill()
    try:
        stopped = pct(bed, "status", PRIVILEGED)
        assert (stopped.returncode, stopped.stdout) == (0, b"status: stopped\n")
        assert b"not running" in execute(bed, "true").stderr
    finally:
        lxc.start()


def test_push_ends_with_0_although_nothing_arrived(bed: Bed, lxc: Lxc, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"bytes")
    done = pct(bed, "push", PRIVILEGED, str(source), "/no/such/folder/file")
    assert done.returncode == 0
    assert done.stderr
    assert pct(bed, "push", PRIVILEGED, str(source), "/opt/pushed").returncode == 0
    assert lxc.run(["cat", "/opt/pushed"]).stdout == "bytes"


def test_pull_leaves_an_empty_file_for_one_that_is_not_there(bed: Bed, tmp_path: Path) -> None:
    assert pct(bed, "pull", PRIVILEGED, "/no/such/file", str(tmp_path / "pulled")).returncode == 0
    assert (tmp_path / "pulled").read_bytes() == b""


def test_what_pct_started_goes_on_when_pct_is_killed(bed: Bed, lxc: Lxc) -> None:
    process = subprocess.Popen(
        [str(bed.pct), "exec", PRIVILEGED, "--", "sleep", "604"], stdin=subprocess.DEVNULL
    )
    while not (found := lxc.pids("sleep 604")):
        assert process.poll() is None
    process.kill()
    process.wait()
    assert all(lxc.is_alive(pid) for pid in found)
    lxc.run(["kill", *map(str, found)])
