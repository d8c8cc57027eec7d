"""What a session is: sshd's environment, bytes both ways, an end that says how, and a life of its own."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import asyncssh
import paramiko
import pytest

from tests.orchestrator.localnode.conftest import (
    TIMEOUT_S,
    is_alive,
    number_in,
    paramiko_client,
    run,
    state_of,
    transport_of,
    until,
    with_asyncssh,
)

BIG = 100_000_000
CHUNK = bytes(range(256)) * 256


def test_the_environment_is_what_sshd_gives_and_nothing_of_the_desk(running_node, client):
    lines = run(client, "env").stdout.decode().splitlines()
    environment = dict(line.split("=", 1) for line in lines)
    environment.pop("PWD", None)  # made by the shell
    state = state_of(running_node)
    assert environment.pop("SSH_CONNECTION").split()[2:] == [running_node.address, str(running_node.port)]
    assert environment.pop("SSH_CLIENT").split()[2:] == [str(running_node.port)]
    assert environment == {
        "HOME": str(state / "home"),
        "USER": running_node.user,
        "LOGNAME": running_node.user,
        "SHELL": "/bin/sh",
        "PATH": f"{state}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
    }


def test_of_a_clients_environment_only_the_locale_is_accepted(running_node):
    async def work(connection):
        sent = {"LANG": "de_DE.UTF-8", "LC_ALL": "C", "LD_PRELOAD": "/evil.so"}
        return (await connection.run("env", env=sent)).stdout.splitlines()

    lines = with_asyncssh(running_node, work)
    assert "LANG=de_DE.UTF-8" in lines
    assert "LC_ALL=C" in lines
    assert not [line for line in lines if line.startswith("LD_PRELOAD")]


def test_a_command_is_read_by_the_login_shell_as_one_string(client):
    assert run(client, "printf '%s,' a  b 'c d' \"$((1+1))\"; exit 4").stdout == b"a,b,c d,2,"


def test_commands_start_in_the_home_folder(running_node, client):
    assert run(client, "pwd").stdout.decode().strip() == str(state_of(running_node) / "home")


def test_without_a_command_the_shell_reads_its_input(client):
    transport = transport_of(client)
    with transport.open_session() as channel:
        channel.invoke_shell()
        channel.sendall(b"echo $((40+2)); exit 5\n")
        assert channel.makefile("rb").read() == b"42\n"
        assert channel.recv_exit_status() == 5


@pytest.mark.parametrize("status", [0, 1, 127, 255])
def test_the_exit_status_arrives(client, status):
    assert run(client, f"exit {status}").status == status


def test_a_signal_that_ends_the_command_arrives_by_its_name(running_node):
    async def work(connection):
        return (await connection.run("kill -TERM $$")).exit_signal

    assert with_asyncssh(running_node, work)[0] == "TERM"


def test_a_signal_from_the_client_reaches_the_command_and_its_children(running_node):
    async def work(connection):
        process = await connection.create_process("echo up; sleep 60; true")
        assert await process.stdout.readline() == "up\n"
        process.send_signal("TERM")
        return await process.wait()

    assert with_asyncssh(running_node, work).exit_signal[0] == "TERM"


def test_every_byte_arrives_unchanged_both_ways_and_the_outputs_stay_apart(client):
    data = CHUNK * 4
    done = run(client, "tee /dev/stderr", data)
    assert done.stdout == data
    assert done.stderr == data


def test_a_command_may_be_any_bytes(client):
    assert run(client, b"printf %s '\xff\xfe \xc3'").stdout == b"\xff\xfe \xc3"


def test_a_command_that_no_shell_can_take_is_an_error_of_the_session_only(client):
    assert run(client, "true " + "x" * 200_000).status == 1
    assert b"Argument list too long" in run(client, "true " + "x" * 200_000).stderr
    assert run(client, "echo on").stdout == b"on\n"


def test_the_end_of_input_reaches_the_command(client):
    assert run(client, "cat; echo end", b"input").stdout == b"inputend\n"


def test_input_that_nobody_reads_does_not_block(client):
    assert run(client, "exec 0<&-; sleep 0.1; echo done", CHUNK * 160).stdout == b"done\n"


def test_a_hundred_megabytes_pass_each_way_without_being_held_in_memory(running_node):
    before = _peak_memory_kb(running_node)

    async def up(connection):
        process = await connection.create_process("cksum", encoding=None, stderr=asyncssh.DEVNULL)
        for _ in range(BIG // len(CHUNK)):
            process.stdin.write(CHUNK)
            await process.stdin.drain()
        process.stdin.write_eof()
        return (await process.stdout.read()).split()[1]

    async def down(connection):
        process = await connection.create_process(f"head -c {BIG} /dev/zero", encoding=None)
        count = 0
        while data := await process.stdout.read(1 << 20):
            count += len(data)
        return count

    assert int(with_asyncssh(running_node, up)) == BIG // len(CHUNK) * len(CHUNK)
    assert with_asyncssh(running_node, down) == BIG
    assert (
        _peak_memory_kb(running_node) - before < 30_000
    )  # the windows of both directions, whatever the size


def test_a_slow_reader_holds_the_command_back(running_node, client, tmp_path):
    counted = tmp_path / "sent"
    transport = transport_of(client)
    with transport.open_session() as channel:
        channel.exec_command(
            f"head -c {BIG} /dev/zero | tee /dev/stdout 2>/dev/null | cat; echo x > {counted}"
        )
        time.sleep(0.5)
        assert not counted.exists()


def test_many_sessions_run_at_once_on_one_connection(client, tmp_path):
    outputs: dict[int, bytes] = {}

    def one(number: int) -> None:
        everybody_is_here = f"while [ $(ls {tmp_path} | wc -l) -lt 16 ]; do sleep 0.05; done"
        outputs[number] = run(client, f"touch {tmp_path}/{number}; {everybody_is_here}; echo {number}").stdout

    threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert outputs == {number: b"%d\n" % number for number in range(16)}


def test_a_dropped_connection_leaves_the_command_running(running_node, tmp_path):
    pid_file, late = tmp_path / "pid", tmp_path / "late"
    dropped = paramiko_client(running_node)
    dropped.exec_command(f"echo $$ > {pid_file}; sleep 1; echo still here > {late}")
    pid = number_in(pid_file)
    transport_of(dropped).sock.close()
    assert is_alive(pid)
    assert until(late.exists)


def test_after_a_dropped_connection_reading_ends_and_writing_is_a_broken_pipe(running_node, tmp_path):
    pid_file, end = tmp_path / "pid", tmp_path / "end"
    dropped = paramiko_client(running_node)
    dropped.exec_command(f"trap '' PIPE; echo $$ > {pid_file}; cat; sleep 0.3; echo x; echo $? > {end}")
    number_in(pid_file)
    dropped.close()
    assert number_in(end) != 0


def test_the_exit_status_comes_with_the_commands_end_and_the_channel_closes_with_its_output(client, tmp_path):
    """What sshd does with ``command &``: the reason why a daemon must let go of its three streams."""
    release = tmp_path / "release"
    with transport_of(client).open_session() as channel:
        channel.settimeout(TIMEOUT_S)
        channel.exec_command(f"(while [ ! -e {release} ]; do sleep 0.05; done; echo late) & exit 6")
        assert channel.recv_exit_status() == 6
        assert not channel.closed
        assert not channel.eof_received
        release.touch()
        assert channel.makefile("rb").read() == b"late\n"


def test_a_terminal_is_not_to_be_had(client):
    with transport_of(client).open_session() as channel, pytest.raises(paramiko.SSHException):
        channel.get_pty()


def test_an_unknown_subsystem_is_refused(client):
    with transport_of(client).open_session() as channel, pytest.raises(paramiko.SSHException):
        channel.invoke_subsystem("netconf")


def test_files_travel_by_sftp_from_the_home_folder(running_node, client, tmp_path):
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(CHUNK * 100)
    with client.open_sftp() as sftp:
        sftp.put(str(source), "sent here")
        assert (state_of(running_node) / "home" / "sent here").read_bytes() == CHUNK * 100
        sftp.get("sent here", str(back))
        assert sftp.stat("sent here").st_size == len(CHUNK) * 100
        sftp.remove("sent here")
        with pytest.raises(FileNotFoundError):
            sftp.stat("sent here")
    assert back.read_bytes() == CHUNK * 100


def test_a_hundred_megabyte_file_travels_by_sftp(running_node, tmp_path):
    source, target = tmp_path / "big", tmp_path / "copy"
    with source.open("wb") as file:
        for _ in range(BIG // len(CHUNK)):
            file.write(CHUNK)

    async def work(connection):
        async with connection.start_sftp_client() as sftp:
            await sftp.put(str(source), str(target))

    with_asyncssh(running_node, work)
    assert target.stat().st_size == source.stat().st_size
    assert target.read_bytes() == source.read_bytes()


def test_more_sessions_than_the_limit_are_refused_and_the_others_go_on(fresh_node):
    info = fresh_node(max_sessions=2)
    with paramiko_client(info) as limited:
        transport = transport_of(limited)
        open_channels = [transport.open_session(), transport.open_session()]
        with pytest.raises(paramiko.ChannelException):
            transport.open_session()
        open_channels.pop().close()

        def free() -> bool:
            try:
                return run(limited, "echo free").stdout == b"free\n"
            except paramiko.ChannelException:
                return False

        assert until(free)


def test_more_logins_at_once_than_the_limit_are_dropped_before_the_banner(fresh_node):
    info = fresh_node(max_startups=1)
    waiting = paramiko.Transport((info.address, info.port))
    waiting.start_client(timeout=10)
    with pytest.raises((paramiko.SSHException, EOFError, OSError)):
        paramiko_client(info)
    waiting.close()

    def free() -> bool:
        try:
            paramiko_client(info).close()
        except (paramiko.SSHException, EOFError, OSError):
            return False
        return True

    assert until(free)


def test_latency_delays_every_round_trip_and_changes_no_byte(fresh_node):
    info = fresh_node(latency_s=0.1)
    with paramiko_client(info) as slow:
        started = time.monotonic()
        assert run(slow, "cat", CHUNK * 16).stdout == CHUNK * 16
        assert time.monotonic() - started > 0.4  # two round trips: open and exec


def test_the_login_shell_can_be_chosen(fresh_node):
    info = fresh_node(shell="/bin/bash")
    with paramiko_client(info) as other:
        assert run(other, "echo $0 ${BASH_VERSION:+is bash}").stdout == b"/bin/bash is bash\n"


def test_a_killed_connection_leaves_no_session_behind_in_the_server(running_node):
    def descriptors() -> int:
        return len(list(Path(f"/proc/{_server_pid(running_node)}/fd").iterdir()))

    before = descriptors()
    for _ in range(5):
        dropped = paramiko_client(running_node)
        dropped.exec_command("sleep 0.2")
        transport_of(dropped).sock.close()
    until(lambda: descriptors() <= before)


def test_no_zombies_are_left_in_the_server(running_node, client):
    for _ in range(5):
        run(client, "true")
    pid = _server_pid(running_node)

    def zombies() -> list[str]:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [child for child in children if not is_alive(int(child))]

    until(lambda: not zombies())


def _server_pid(info) -> int:
    return int(json.loads((state_of(info) / "run/server.json").read_text())["process"][0])


def _peak_memory_kb(info) -> int:
    lines = Path(f"/proc/{_server_pid(info)}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
