"""Doctor on a real container, and many commands at once within the limits of a real sshd."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from orchestrator.connection import Connection
from orchestrator.container import Container
from orchestrator.inventory import Destination
from tests.lxc.desk import Desk
from tests.lxc.lxc import Lxc

MAX_STARTUPS = 10
MAX_SESSIONS = 10
"""What sshd allows by default."""


@pytest.fixture
def locked(lxc: Lxc) -> Iterator[None]:
    before = lxc.pct_conf.read_text()
    lxc.pct_conf.write_text(before + "lock: backup\n")
    yield
    lxc.pct_conf.write_text(before)


@pytest.fixture
def small_shm(lxc: Lxc) -> Iterator[None]:
    assert lxc.run(["mount", "-o", "remount,size=16m", "/dev/shm"]).returncode == 0
    yield
    lxc.run(["mount", "-o", "remount,size=50%", "/dev/shm"])


def findings(desk: Desk, status: int, *options: str) -> dict[str, Any]:
    done = desk.run("doctor", "--json", *options)
    assert done.status == status, done.text
    return {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_a_container_with_systemd_and_a_compiler_is_fit_for_a_run_on_cpus(desk: Desk) -> None:
    found = findings(desk, 0)
    assert found["init"]["seen"] == "systemd starts units"
    assert {name for name, finding in found.items() if finding["severity"] == "error"} == set()


def test_a_container_that_a_backup_has_locked_is_refused_by_doctor_and_by_train(
    desk: Desk, locked: None
) -> None:
    assert "pct unlock 200" in findings(desk, 4)["lock"]["fix"]
    refused = desk.run("train", "--cold", "--detach")
    assert refused.status == 4
    assert "locked by Proxmox: backup" in refused.text
    assert "ANYWAY=1" in refused.text


def test_a_frozen_container_is_a_finding_within_a_deadline(desk: Desk, lxc: Lxc) -> None:
    assert desk.run("deploy").status == 0
    lxc.freeze()
    try:
        found = findings(desk, 4)
    finally:
        lxc.unfreeze()
    assert "frozen" in found["container"]["seen"]
    assert "pct resume 200" in found["container"]["fix"]


def test_a_small_shared_memory_is_a_warning_for_cpus_with_the_mount_that_mends_it(
    desk: Desk, small_shm: None
) -> None:
    found = findings(desk, 0)["shm"]
    assert (found["severity"], "16 MiB" in found["seen"]) == ("warning", True)
    assert "mount -o remount,size=8G /dev/shm" in found["fix"]


def test_three_times_the_sessions_that_sshd_allows_all_come_through_one_connection(
    container: Container,
) -> None:
    with ThreadPoolExecutor(3 * MAX_SESSIONS) as pool:
        said = list(pool.map(lambda number: container.run(["echo", str(number)]).stdout, range(60)))
    assert said == [f"{number}\n".encode() for number in range(60)]


def test_three_times_the_logins_that_sshd_allows_at_once_all_come_through(destination: Destination) -> None:
    def ask(number: int) -> bytes:
        with Connection(destination.host_name, destination.host) as connection:
            return connection.run(["echo", str(number)]).stdout

    with ThreadPoolExecutor(3 * MAX_STARTUPS) as pool:
        said = list(pool.map(ask, range(3 * MAX_STARTUPS)))
    assert said == [f"{number}\n".encode() for number in range(3 * MAX_STARTUPS)]
