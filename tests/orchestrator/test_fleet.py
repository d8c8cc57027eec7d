"""Many containers at once: each answers for itself, and a host that does not keeps nobody waiting."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from orchestrator.errors import RemoteError, TransportError
from orchestrator.fleet import Outcome, failure, on_each
from orchestrator.inventory import Destination, load_inventory
from orchestrator.localnode import node
from orchestrator.localnode.server import ServerOptions
from orchestrator.targets import select
from tests.orchestrator.test_cli import REPOSITORY, orchestrator

SSHD = ServerOptions(max_sessions=10, max_startups=10)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The inventory of two nodes with the limits of sshd, of four containers and of one."""
    base = tmp_path_factory.mktemp("hosts")
    merged: dict[str, object] = {}
    try:
        for name, count in (("many", 4), ("one", 1)):
            info = node.start(base / name, options=SSHD)
            for number in range(201, 200 + count):
                info = node.add_container(base / name, str(number))
            merged[name] = yaml.safe_load(info.inventory.read_text())["hosts"]["local"]
        (base / "inventory.yaml").write_text(yaml.safe_dump({"hosts": merged}))
        yield base / "inventory.yaml"
    finally:
        for name in ("many", "one"):
            node.stop(base / name)


@pytest.fixture
def with_bad_hosts(hosts: Path, tmp_path: Path) -> Iterator[Path]:
    """The same, beside a host where nothing listens and one that accepts and stays silent."""
    content = yaml.safe_load(hosts.read_text())
    with socket.socket() as closed, socket.socket() as silent:
        closed.bind(("127.0.0.1", 0))
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        for name, listener in (("closed", closed), ("silent", silent)):
            port = listener.getsockname()[1]
            content["hosts"][name] = content["hosts"]["one"] | {"port": port, "connect_timeout_s": 2}
        path = tmp_path / "inventory.yaml"
        path.write_text(yaml.safe_dump(content))
        yield path


def everything(inventory: Path) -> list[Destination]:
    return select(load_inventory(inventory), "all", None, inventory)


def test_every_container_is_worked_on_once_over_one_connection_a_host(hosts: Path) -> None:
    destinations = everything(hosts)
    connections: dict[str, set[int]] = {}

    def work(container: object) -> str:
        connection = container.connection  # type: ignore[attr-defined]
        connections.setdefault(connection.name, set()).add(id(connection))
        return container.run(["echo", "here"]).stdout.decode()  # type: ignore[attr-defined]

    outcomes = list(on_each(destinations, work))
    assert sorted(str(o.destination) for o in outcomes) == sorted(map(str, destinations))
    assert {o.result for o in outcomes} == {"here\n"}
    assert {len(used) for used in connections.values()} == {1}


def test_a_bad_host_is_reported_and_slows_none_of_the_others(with_bad_hosts: Path) -> None:
    began = time.monotonic()
    came: dict[str, float] = {}
    outcomes = []
    for outcome in on_each(everything(with_bad_hosts), lambda container: container.run(["true"]).exit_status):
        came[str(outcome.destination)] = time.monotonic() - began
        outcomes.append(outcome)
    failed = {o.destination.host_name: o.error for o in outcomes if o.error}
    assert set(failed) == {"closed", "silent"}
    assert "Connection refused" in str(failed["closed"])
    assert "no answer in time" in str(failed["silent"])
    slowest_good = max(at for place, at in came.items() if "many" in place or "one" in place)
    assert slowest_good < came["container 200 on silent"]
    # One timeout, not one for each try.
    assert came["container 200 on silent"] < 10


def test_an_error_of_the_desk_itself_is_raised_and_ends_the_others(hosts: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        list(on_each(everything(hosts), lambda container: 1 // 0))


def test_the_exit_status_of_several_is_the_worst_and_equal_reasons_are_said_once(hosts: Path) -> None:
    one, two, three, *_ = everything(hosts)
    outcomes = [
        Outcome(one, None, TransportError("the link broke.", "look at the cable"), 1.0),
        Outcome(two, None, TransportError("the link broke.", "look at the cable"), 1.0),
        Outcome(three, None, RemoteError("it failed."), 1.0),
        Outcome(one, 1, None, 1.0),
    ]
    error = failure(outcomes, "`status`")
    assert error is not None
    assert error.exit_status == 3
    assert error.message.count("the link broke.") == 1
    assert "3 of 4 containers" in error.message
    assert error.hint == "look at the cable"
    assert failure(outcomes[3:], "`status`") is None


def test_deploy_and_status_of_all_show_a_row_for_each_and_end_with_the_worst_status(
    with_bad_hosts: Path,
) -> None:
    done = orchestrator("deploy", "--all", inventory=with_bad_hosts)
    assert done.returncode == 3, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert rows[0][:3] == ["host", "ct", "release"]
    assert len(rows) == 1 + 7
    assert sorted(row[3] for row in rows[1:] if row[0] in ("many", "one")) == ["sent"] * 5
    assert done.stderr.count("error:") == 1
    assert "2 of 7 containers" in done.stderr
    again = orchestrator("status", "--json", "--host", "many,one", "--ct", "200", inventory=with_bad_hosts)
    assert again.returncode == 0
    found = json.loads(again.stdout)
    assert [(each["host"], each["container"], each["error"]) for each in found] == [
        ("many", "200", None),
        ("one", "200", None),
    ]
    assert found[0]["result"]["runs"] == []


def test_doctor_of_all_is_a_row_each(hosts: Path) -> None:
    done = orchestrator("doctor", "--host", "many", "--ct", "all", inventory=hosts)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\tok\t") == 4


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_one_unfit_container_of_many_is_exit_status_4(hosts: Path, options: tuple[str, ...]) -> None:
    config = hosts.parent / "many/containers/202/config"
    before = config.read_text()
    config.write_text(before + "lock: snapshot\n")
    try:
        done = orchestrator("doctor", *options, "--host", "many", "--ct", "all", inventory=hosts)
    finally:
        config.write_text(before)
    assert done.returncode == 4
    assert "1 of 4 containers are not fit for a run: container 202 on many" in done.stderr
    if options:
        assert [found["result"]["worst"] for found in json.loads(done.stdout)] == ["ok", "ok", "error", "ok"]


def test_a_run_is_asked_of_one_container(hosts: Path) -> None:
    done = orchestrator("status", "--all", "20261130-101010-abcdef", inventory=hosts)
    assert done.returncode == 2
    assert "which one has" in done.stderr


def test_ctrl_c_ends_it_at_once_and_says_how_far_it_was(with_bad_hosts: Path) -> None:
    content = yaml.safe_load(with_bad_hosts.read_text())
    content["hosts"]["silent"]["connect_timeout_s"] = 60
    with_bad_hosts.write_text(yaml.safe_dump(content))
    command = [
        sys.executable,
        "-m",
        "orchestrator.cli",
        "status",
        "--all",
        "--inventory",
        str(with_bad_hosts),
    ]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("host\t")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted:" in said
    assert "of 7 had answered" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_sixty_four_containers_of_one_host_are_deployed_and_shown_within_the_limits_of_sshd(
    tmp_path: Path,
) -> None:
    try:
        node.start(tmp_path / "node", options=SSHD)
        for number in range(201, 264):
            info = node.add_container(tmp_path / "node", str(number))
        for verb, bound_s in (("deploy", 120), ("deploy", 60), ("status", 30)):
            began = time.monotonic()
            done = orchestrator(
                verb, "--host", "local", "--ct", "all", inventory=info.inventory, timeout_s=120
            )
            assert done.returncode == 0, done.stderr
            assert len(done.stdout.splitlines()) == 1 + 64
            assert time.monotonic() - began < bound_s
    finally:
        node.stop(tmp_path / "node")
