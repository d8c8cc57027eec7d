"""A container's life: what starts in it stays in it, and ends with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from orchestrator.localnode import init, node, process
from orchestrator.localnode.provision import base_python, write_launchers
from tests.orchestrator.localnode.conftest import (
    NO_PIP_SETTINGS,
    is_alive,
    number_in,
    paramiko_client,
    pct,
    pct_over_ssh,
    rootfs_of,
    state_of,
    until,
)


@pytest.fixture(scope="module")
def own_node(tmp_path_factory):
    state = tmp_path_factory.mktemp("life") / "state"
    yield node.start(state, environment=NO_PIP_SETTINGS)
    node.stop(state)


@pytest.fixture
def info(own_node):
    """A node whose container 200 runs, empty, whatever the test before did to it."""
    pct(own_node, "stop", "200")
    return node.start(state_of(own_node), environment=NO_PIP_SETTINGS)


def start_in(info, *argv: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([str(info.pct), "exec", "200", "--", *argv], stdin=subprocess.DEVNULL)


def init_of(info, container_id: str = "200") -> int:
    """The pid of the container's init: the parent of whatever runs in it."""
    done = pct(info, "exec", container_id, "--", "sh", "-c", "echo $PPID")
    assert done.status == 0, done
    return int(done.stdout)


def test_stopping_a_container_kills_what_runs_in_it_and_tells_who_waits(info, tmp_path):
    waiting = start_in(info, "sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 60; true")
    pid = number_in(tmp_path / "pid")
    assert pct(info, "stop", "200").status == 0
    assert not is_alive(pid)
    assert waiting.wait(10) == 128 + signal.SIGKILL


DAEMON = """
import os, signal, sys, time
for stream in range(3):  # whoever keeps these keeps pct's caller waiting
    os.dup2(os.open(os.devnull, os.O_RDWR), stream)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
for _ in range(2):
    if os.fork():
        os._exit(0)
    os.setsid()
open(sys.argv[1], "w").write(f"{os.getpid()}\\n")
time.sleep(60)
"""


@pytest.mark.parametrize("cleared", [[], ["/usr/bin/env", "-i"]])
def test_stopping_a_container_kills_daemons_that_left_their_session_parent_and_environment(
    info, tmp_path, cleared
):
    pid_file = tmp_path / "pid"
    done = pct(info, "exec", "200", "--", *cleared, base_python(), "-I", "-S", "-c", DAEMON, str(pid_file))
    assert done.status == 0
    pid = number_in(pid_file)
    assert is_alive(pid)
    assert pct(info, "stop", "200").status == 0
    assert not is_alive(pid)


def test_stopping_a_container_outruns_processes_that_keep_forking(info, tmp_path):
    (tmp_path / "count").mkdir()
    start_in(info, "sh", "-c", f"while :; do (sleep 0.05; touch {tmp_path}/count/x) & sleep 0.01; done")
    until((tmp_path / "count/x").exists)
    assert pct(info, "stop", "200").status == 0
    (tmp_path / "count/x").unlink(missing_ok=True)
    with pytest.raises(AssertionError):
        until((tmp_path / "count/x").exists, timeout_s=0.4)


def test_stopping_one_container_leaves_the_other_alone(info, tmp_path):
    node.add_container(state_of(info), "201", environment=NO_PIP_SETTINGS)
    start_in(info, "sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 60")
    pid = number_in(tmp_path / "pid")
    assert pct(info, "stop", "201").status == 0
    assert is_alive(pid)
    assert pct(info, "status", "200").stdout == b"status: running\n"


def test_a_stopped_container_starts_again(info):
    first = init_of(info)
    assert pct(info, "stop", "200").status == 0
    assert pct(info, "status", "200").stdout == b"status: stopped\n"
    assert pct(info, "start", "200").status == 0
    assert init_of(info) != first


def test_starting_what_runs_and_stopping_what_does_not_are_errors(info):
    assert (pct(info, "start", "200").status, pct(info, "start", "200").stderr) == (
        255,
        b"CT 200 already running\n",
    )
    assert pct(info, "stop", "200").status == 0
    assert (pct(info, "stop", "200").status, pct(info, "stop", "200").stderr) == (
        255,
        b"CT 200 not running\n",
    )


def test_of_several_starts_at_once_one_wins(info):
    assert pct(info, "stop", "200").status == 0
    starts = [subprocess.Popen([str(info.pct), "start", "200"], stderr=subprocess.DEVNULL) for _ in range(4)]
    assert sorted(start.wait(20) for start in starts) == [0, 255, 255, 255]


def test_a_container_whose_init_was_killed_is_stopped_and_starts_again(info):
    os.kill(init_of(info), signal.SIGKILL)
    until(lambda: pct(info, "status", "200").stdout == b"status: stopped\n")
    assert pct(info, "exec", "200", "--", "true").status == 111  # ECONNREFUSED, left over from looking
    assert pct(info, "start", "200").status == 0
    assert pct(info, "exec", "200", "--", "true").status == 0


def test_killing_init_with_term_stops_the_container_in_order(info, tmp_path):
    start_in(info, "sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 60")
    pid = number_in(tmp_path / "pid")
    os.kill(init_of(info), signal.SIGTERM)
    until(lambda: pct(info, "status", "200").stdout == b"status: stopped\n")
    assert not is_alive(pid)


def test_a_command_cannot_end_its_container_with_a_signal_to_its_group(info):
    assert pct(info, "exec", "200", "--", "sh", "-c", "kill -9 0").status == 128 + signal.SIGKILL
    assert pct(info, "exec", "200", "--", "true").status == 0


def test_orphans_are_reaped_by_init(info):
    pct(info, "exec", "200", "--", "sh", "-c", "(sleep 0.1 & ) ; true")
    pid = init_of(info)
    until(lambda: not [child for child in process.descendants(pid) if not is_alive(child)])


def test_a_command_outlives_the_ssh_connection_and_the_ssh_server(info, tmp_path):
    client = paramiko_client(info)
    thread = threading.Thread(
        target=lambda: pct_over_ssh(
            client, "exec", "200", "--", "sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 60"
        ),
        daemon=True,
    )
    thread.start()
    pid = number_in(tmp_path / "pid")
    client.close()
    record = json.loads((state_of(info) / "run/server.json").read_text())
    os.kill(record["process"][0], signal.SIGKILL)
    until(lambda: node.status(state_of(info)) is None)
    assert is_alive(pid)
    again = node.start(state_of(info), environment=NO_PIP_SETTINGS)
    assert is_alive(pid)
    assert pct(again, "exec", "200", "--", "kill", str(pid)).status == 0


def test_garbage_at_the_socket_does_not_end_the_container(info):
    folder = str(rootfs_of(info).parent)
    for junk in (b"", b"x", b"x0000000000\n", b"x9999999999\nabc", b"?" * 64):
        with init.connect(folder) as connection:
            connection.sendall(junk)
    pid = init_of(info)
    until(lambda: process.descendants(pid) == [])
    assert pct(info, "exec", "200", "--", "true").status == 0


def test_forty_commands_at_once_neither_fail_nor_hang(info):
    commands = [
        subprocess.Popen([str(info.pct), "exec", "200", "--", "sh", "-c", f"exit {number}"])
        for number in range(40)
    ]
    assert [command.wait(60) for command in commands] == list(range(40))


def test_a_state_folder_with_a_long_and_awkward_name_works(tmp_path):
    state = tmp_path / ("very long 'quoted\" $name; " * 6) / "state"
    info = node.start(state, environment=NO_PIP_SETTINGS)
    try:
        assert pct(info, "exec", "200", "--", "echo", "in").stdout == b"in\n"
        with paramiko_client(info) as client:
            assert pct_over_ssh(client, "status", "200").stdout == b"status: running\n"
    finally:
        node.stop(state)


def test_an_interpreter_in_a_folder_with_spaces_works(info, tmp_path, monkeypatch):
    folder = tmp_path / "my python's"
    folder.mkdir()
    wrapper = folder / "python 3"
    wrapper.write_text(f'#!/bin/sh\nexec {base_python()} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr("orchestrator.localnode.provision.base_python", lambda: str(wrapper))
    write_launchers(state_of(info))
    assert pct(info, "exec", "200", "--", "echo", "a b", "'").stdout == b"a b '\n"


def test_everything_is_gone_when_the_node_stopped(fresh_node, tmp_path):
    info = fresh_node()
    start_in(info, "sleep", "60")
    until(lambda: pct(info, "exec", "200", "--", "true").status == 0)
    assert node.stop(state_of(info))
    marker = os.fsencode(state_of(info))
    left = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if marker in _content(path) and path.parent.name != str(os.getpid())
    ]
    assert left == []
    shutil.rmtree(state_of(info))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
