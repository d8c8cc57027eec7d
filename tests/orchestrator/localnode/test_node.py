"""Starting and stopping the node: once, again, after a crash, and side by side with stale files."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from orchestrator.connection import Connection
from orchestrator.errors import RemoteError, TransportError, UsageError
from orchestrator.inventory import load_inventory, resolve
from orchestrator.localnode import node, process
from orchestrator.localnode.inventory_file import ContainerPlan
from orchestrator.localnode.provision import base_python
from tests.orchestrator.localnode.conftest import (
    NO_PIP_SETTINGS,
    is_alive,
    paramiko_client,
    pct,
    rootfs_of,
    run,
    state_of,
    until,
)

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def state(tmp_path):
    yield tmp_path / "state"
    node.stop(tmp_path / "state")


def start(state, **options):
    return node.start(state, environment=NO_PIP_SETTINGS, **options)


def server_pid(state) -> int:
    return int(json.loads((state / "run/server.json").read_text())["process"][0])


def works(info) -> bool:
    with paramiko_client(info) as client:
        return run(client, "pct exec 200 -- echo works").stdout == b"works\n"


def test_a_node_that_never_was_is_not_running_and_stopping_it_makes_nothing(state):
    assert node.status(state) is None
    assert node.stop(state) is False
    assert not state.exists()


def test_start_status_stop(state):
    info = start(state)
    assert works(info)
    assert node.status(state) == info
    assert node.stop(state) is True
    assert node.status(state) is None
    assert node.stop(state) is False


def test_starting_twice_is_starting_once(state):
    first = start(state)
    pid, key = server_pid(state), first.client_key.read_bytes()
    assert start(state) == first
    assert (server_pid(state), first.client_key.read_bytes()) == (pid, key)


def test_of_several_starts_at_once_all_get_the_same_node(state):
    infos: list[node.NodeInfo] = []
    threads = [threading.Thread(target=lambda: infos.append(start(state))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(infos) == 4
    assert len(set(infos)) == 1
    assert works(infos[0])


def test_the_node_outlives_the_process_that_started_it_and_is_nobodys_child(state):
    program = (
        "import sys, pathlib; from orchestrator.localnode import node; "
        "node.start(pathlib.Path(sys.argv[1]), environment={'PIP_CONFIG_FILE': '/dev/null'})"
    )
    root = node.provision.package_root()
    done = subprocess.run(
        [sys.executable, "-c", program, str(state)], cwd=root, timeout=60, capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    info = node.status(state)
    assert info is not None
    assert works(info)
    assert os.getsid(server_pid(state)) != os.getsid(0)


def test_a_restart_keeps_the_keys_the_port_and_the_containers_files(state):
    first = start(state)
    (rootfs_of(first) / "opt/dflash/kept").write_text("x")
    known = first.known_hosts.read_text()
    node.stop(state)
    second = start(state)
    assert second == first
    assert second.known_hosts.read_text() == known
    assert (rootfs_of(second) / "opt/dflash/kept").read_text() == "x"
    assert works(second)


def test_a_restart_takes_another_port_when_somebody_else_has_the_old_one(state):
    first = start(state)
    node.stop(state)
    with socket.create_server(("127.0.0.1", first.port)):
        second = start(state)
        assert second.port != first.port
        assert works(second)
        assert load_inventory(second.inventory).hosts["local"].port == second.port


def test_after_a_crash_of_the_server_start_brings_it_back(state):
    first = start(state)
    os.kill(server_pid(state), signal.SIGKILL)
    until(lambda: node.status(state) is None)
    second = start(state)
    assert works(second)
    assert second.containers == first.containers


def test_a_pid_that_now_belongs_to_somebody_else_gets_no_signal(state):
    start(state)
    node.stop(state)
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        who = process.identity(bystander.pid)
        assert who is not None
        for stale in ([who[0], who[1] - 1, who[2]], [who[0], who[1], "another boot"]):
            (state / "run/server.json").write_text(json.dumps({"process": stale, "port": 1}))
            assert node.status(state) is None
            assert node.stop(state) is False
            assert is_alive(bystander.pid)
        assert works(start(state))
    finally:
        bystander.kill()
        bystander.wait(10)


def test_a_record_that_is_damaged_counts_as_none(state):
    start(state)
    node.stop(state)
    for junk in ("", "{", "[]", '{"process": "x", "port": 1}', '{"process": [1], "port": null}'):
        (state / "run/server.json").write_text(junk)
        assert node.status(state) is None
    assert works(start(state))


def test_leftover_sockets_and_locks_do_not_keep_a_node_from_starting(state):
    info = start(state)
    folder = state / "containers/200"
    node.stop(state)
    with socket.socket(socket.AF_UNIX) as stale:
        here = os.open(folder, os.O_RDONLY)
        stale.bind(f"/proc/self/fd/{here}/init.sock")
        os.close(here)
    (folder / "lock").write_text("stale")
    assert works(start(state))
    assert info.containers == ("200",)


def test_a_server_that_cannot_start_is_an_error_with_its_last_words_and_its_log(state):
    start(state)
    node.stop(state)
    (state / "etc/host_key").write_text("not a key")
    with pytest.raises(RemoteError) as failed:
        start(state)
    (state / "etc/host_key").unlink()
    assert re.search(r"SSH server did not start: .*Invalid private key", failed.value.message)
    assert failed.value.hint == f"Its log: {state / 'log/server.log'}"
    assert "Invalid private key" in (state / "log/server.log").read_text()


def test_a_container_can_be_added_and_is_in_the_inventory(state):
    start(state)
    plan = ContainerPlan(recipe="smollm2", torch_version="2.12.0", gpus=2, python="/usr/bin/python3")
    info = node.add_container(state, "301", plan=plan, environment=NO_PIP_SETTINGS)
    assert info.containers == ("200", "301")
    assert pct(info, "exec", "301", "--", "pwd").stdout.decode().strip() == str(rootfs_of(info, "301"))
    added = resolve(load_inventory(info.inventory), "local", "301", info.inventory).container
    assert (added.recipe, added.torch.version, added.gpus, added.python) == (
        "smollm2",
        "2.12.0",
        2,
        "/usr/bin/python3",
    )
    node.stop(state)
    assert start(state).containers == ("200", "301")
    assert resolve(load_inventory(info.inventory), "local", "301", info.inventory).container == added


@pytest.mark.parametrize("wrong", ["", "abc", "99", "../200", "٣٠٠", "0123", "1234567890"])
def test_an_id_that_is_none_is_refused(running_node, wrong):
    with pytest.raises(UsageError):
        node.add_container(state_of(running_node), wrong, environment=NO_PIP_SETTINGS)


def test_an_id_that_is_taken_and_a_node_that_does_not_run_are_refused(state):
    start(state)
    with pytest.raises(UsageError, match="already"):
        node.add_container(state, "200", environment=NO_PIP_SETTINGS)
    node.stop(state)
    with pytest.raises(UsageError, match="No node runs"):
        node.add_container(state, "201", environment=NO_PIP_SETTINGS)


def test_the_inventory_reaches_the_node_through_the_controllers_own_models(running_node):
    inventory = load_inventory(running_node.inventory)
    destination = resolve(inventory, "local", "200", running_node.inventory)
    host, container = destination.host, destination.container
    assert (host.address, host.port, host.user) == (
        running_node.address,
        running_node.port,
        running_node.user,
    )
    assert (host.identity_file, host.known_hosts) == (
        str(running_node.client_key),
        str(running_node.known_hosts),
    )
    assert (host.pct, host.sudo) == (str(running_node.pct), False)
    assert container.root == str(rootfs_of(running_node) / "opt/dflash")
    assert container.home == str(rootfs_of(running_node) / "root")
    assert container.python == base_python()
    assert (container.recipe, container.gpus) == ("tiny-cpu", 0)
    assert (container.torch.version, container.torch.backend) == ("2.13.0", "cpu")


def test_the_containers_python_is_no_venvs(running_node):
    shown = pct(
        running_node,
        "exec",
        "200",
        "--",
        base_python(),
        "-c",
        "import sys; print(sys.prefix == sys.base_prefix)",
    )
    assert shown.stdout == b"True\n"


def test_a_folder_that_holds_something_else_is_left_alone(state):
    state.mkdir(mode=0o755)
    (state / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="is not a node"):
        start(state)
    assert [path.name for path in state.iterdir()] == ["thesis.txt"]
    assert state.stat().st_mode & 0o777 == 0o755


def test_nothing_is_printed(state, capfd):
    start(state)
    node.stop(state)
    assert capfd.readouterr() == ("", "")


def test_the_state_folder_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    info = node.start(tmp_path.__class__("here"), environment=NO_PIP_SETTINGS)
    try:
        assert state_of(info) == tmp_path / "here"
        assert works(info)
    finally:
        node.stop(tmp_path / "here")


@pytest.mark.parametrize(("folder", "command"), [(".dflash/node", "make node-start"), ("it's", None)])
def test_a_command_on_a_node_that_does_not_run_says_what_starts_it(tmp_path, folder, command):
    def status():
        return subprocess.run(
            [sys.executable, "-m", "orchestrator.cli", "status", "--host", "local", "--ct", "200"],
            cwd=tmp_path,
            env={**os.environ, "DFLASH_INVENTORY": f"{folder}/inventory.yaml"},
            capture_output=True,
            text=True,
            timeout=60,
        )

    start(tmp_path / folder)
    node.stop(tmp_path / folder)
    refused = status()
    assert refused.returncode == 3
    assert "Connection refused" in refused.stderr
    hint = refused.stderr.splitlines()[-1]
    assert hint.endswith(command or "make node-start")
    words = shlex.split(hint.split("Start it: ")[1])
    named = dict(word.split("=", 1) for word in words[:-2])
    state = tmp_path / named.get("DFLASH_NODE", folder)
    assert bool(named) == (command is None)
    try:
        started = subprocess.run(
            ["make", "--old-file=.venv/.desk", "node-start"],
            cwd=REPOSITORY,
            env={**os.environ, "DFLASH_NODE": str(state)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert started.returncode == 0, started.stderr
        assert "Connection refused" not in status().stderr
    finally:
        node.stop(tmp_path / folder)


def test_an_inventory_of_a_real_host_names_no_node(tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    host = f"hosts: {{local: {{address: 127.0.0.1, port: {port}, known_hosts: {tmp_path}/known_hosts}}}}"
    (tmp_path / "known_hosts").touch()
    settings = tmp_path / "inventory.yaml"
    settings.write_text(host)
    with (
        Connection("local", load_inventory(settings).hosts["local"]) as connection,
        pytest.raises(TransportError, match="Connection refused") as raised,
    ):
        connection.open()
    assert "node-start" not in raised.value.hint
