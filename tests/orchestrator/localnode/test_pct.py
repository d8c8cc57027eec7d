"""The semantics of pct, its traps above all: each of these has cost somebody an evening on a real host."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from orchestrator.localnode import containers, node
from tests.orchestrator.localnode.conftest import (
    NO_PIP_SETTINGS,
    is_alive,
    number_in,
    pct,
    pct_over_ssh,
    rootfs_of,
    run,
    state_of,
    until,
)


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    """A node whose containers these tests may stop: 200 runs, 201 is stopped."""
    state = tmp_path_factory.mktemp("pct") / "state"
    node.start(state, environment=NO_PIP_SETTINGS)
    started = node.add_container(state, "201", environment=NO_PIP_SETTINGS)
    assert pct(started, "stop", "201").status == 0
    yield started
    node.stop(state)


def environment_of(done) -> dict[str, str]:
    return dict(line.split("=", 1) for line in done.stdout.decode().splitlines())


# exec


def test_exec_passes_everything_after_the_first_dashes(info):
    assert pct(info, "exec", "200", "--", "echo", "--", "-n", "--keep-env").stdout == b"-- -n --keep-env\n"


def test_without_dashes_the_commands_options_are_taken_for_pcts(info):
    done = pct(info, "exec", "200", "ls", "-la")
    assert done.status == 255
    assert b"Unknown option: la" in done.stderr


def test_without_dashes_a_command_that_has_no_options_works(info):
    assert pct(info, "exec", "200", "echo", "a", "b").stdout == b"a b\n"


def test_an_option_may_stand_anywhere_before_the_dashes(info):
    assert "HOME" not in environment_of(pct(info, "exec", "200", "--keep-env=0", "--", "env"))
    assert "HOME" not in environment_of(pct(info, "exec", "--keep-env=0", "200", "--", "env"))
    assert "HOME" not in environment_of(pct(info, "exec", "-keep", "0", "200", "--", "env"))


def test_keep_env_swallows_the_container_id_as_its_value(info):
    done = pct(info, "exec", "--keep-env", "200", "--", "id")
    assert done.status == 255
    assert b"keep-env: type check ('boolean') failed - got '200'" in done.stderr


def test_the_hosts_environment_leaks_in_and_path_is_overwritten(running_node, client):
    leaked = environment_of(pct_over_ssh(client, "exec", "200", "--", "env"))
    assert leaked["PATH"] == "/sbin:/bin:/usr/sbin:/usr/bin"
    assert leaked["HOME"] == str(state_of(running_node) / "home")
    assert leaked["LANG"] == "C.UTF-8"
    assert leaked["USER"] == running_node.user
    assert leaked["SSH_CONNECTION"]
    assert leaked["container"] == "lxc"


def test_of_the_hosts_environment_only_the_certificate_paths_stay_outside(info):
    host = {"SSL_CERT_FILE": "/a", "SSL_CERT_DIR": "/b", "OTHER": "x\ny=z", "EMPTY": "", "PATH": "/nowhere"}
    done = pct(info, "exec", "200", "--", "env", "-0", env=host)
    assert set(done.stdout.split(b"\0")) == {
        b"",
        b"OTHER=x\ny=z",
        b"EMPTY=",
        b"PATH=/sbin:/bin:/usr/sbin:/usr/bin",
        b"container=lxc",
    }


def test_with_a_cleared_environment_there_is_a_path_and_nothing_else(info):
    assert environment_of(pct(info, "exec", "--keep-env=0", "200", "--", "env")) == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "container": "lxc",
    }


def test_a_command_is_looked_up_in_the_path_of_its_environment(info):
    assert pct(info, "exec", "200", "--", "pct", env={"PATH": str(info.pct.parent)}).status == 127
    assert pct(info, "exec", "200", "--", "/usr/bin/env", "-i", "true").status == 0


def test_no_shell_reads_the_arguments(info):
    assert pct(info, "exec", "200", "--", "echo", "$HOME; *").stdout == b"$HOME; *\n"


def test_commands_start_in_the_containers_root_folder(info, tmp_path):
    assert pct(info, "exec", "200", "--", "pwd", cwd=tmp_path).stdout.decode().strip() == str(rootfs_of(info))


@pytest.mark.parametrize("status", [0, 1, 2, 126, 127, 128, 255])
def test_the_exit_status_is_the_commands_own(info, status):
    assert pct(info, "exec", "200", "--", "sh", "-c", f"exit {status}").status == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_is_128_and_its_number(info, number):
    assert pct(info, "exec", "200", "--", "sh", "-c", f"kill -{int(number)} $$").status == 128 + number


@pytest.mark.parametrize("name", ["no-such-command", "/no/such/file", ""])
def test_a_command_that_is_not_there_is_127(info, name):
    done = pct(info, "exec", "200", "--", name)
    assert done.status == 127
    assert b"Failed to exec" in done.stderr


@pytest.mark.parametrize("name", ["/etc/passwd", "/"])
def test_a_command_that_cannot_be_executed_is_126(info, name):
    assert pct(info, "exec", "200", "--", name).status == 126


def test_a_script_without_an_interpreter_line_is_run_by_sh(info):
    script = rootfs_of(info) / "tmp" / "script"
    script.write_text("echo run $1\n")
    script.chmod(0o755)
    assert pct(info, "exec", "200", "--", str(script), "it").stdout == b"run it\n"


def test_a_missing_container_dies_with_an_errno_that_a_command_could_have_returned(info):
    done = pct(info, "exec", "999", "--", "true")
    assert done.status == 2
    assert b"Configuration file" in done.stderr
    assert b"does not exist" in done.stderr


def test_a_stopped_container_dies_with_an_errno_or_255(info):
    done = pct(info, "exec", "201", "--", "true")
    assert done.status not in (0, 1)
    assert done.stderr == b"container '201' not running!\n"


def test_a_missing_command_dies(info):
    done = pct(info, "exec", "200")
    assert (done.status, done.stderr) == (255, b"missing command\n")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["exec"],
        ["exec", "abc", "--", "true"],
        ["exec", "99", "--", "true"],
        ["exec", "--bogus", "200"],
        ["status"],
        ["status", "200", "201"],
        ["list", "200"],
        ["push", "200", "a"],
        ["push", "200", "a", "b", "--perms"],
    ],
)
def test_a_command_line_that_is_not_understood_is_255_as_is_ssh_itself(info, words):
    done = pct(info, *words)
    assert done.status == 255
    assert done.stdout == b""
    assert done.stderr


def test_the_command_eats_the_callers_input(client):
    assert run(client, "pct exec 200 -- cat >/dev/null; cat", b"gone").stdout == b""
    assert run(client, "pct exec 200 -- cat </dev/null; cat", b"kept").stdout == b"kept"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_killing_pct_leaves_the_command_running(info, tmp_path, number):
    pid_file = tmp_path / "pid"
    caller = subprocess.Popen(
        [info.pct, "exec", "200", "--", "sh", "-c", f"echo $$ > {pid_file}; exec sleep 60"],
        stdin=subprocess.DEVNULL,
    )
    pid = number_in(pid_file)
    caller.send_signal(number)
    assert caller.wait(10) == -number
    time.sleep(0.1)
    assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid))


def test_a_command_has_default_signals_and_a_session_of_its_own(info):
    shown = pct(info, "exec", "200", "--", "cat", "/proc/self/status", "/proc/self/stat").stdout.decode()
    ignored = next(line.split()[1] for line in shown.splitlines() if line.startswith("SigIgn"))
    # Signals 32 and 33 are the C library's own: no program can set them, so what this process has is inherited.
    assert int(ignored, 16) & 0x7FFFFFFF == 0
    pid, _, _, _, group, session = shown.splitlines()[-1].split()[:6]
    assert pid == group == session


def test_a_command_inherits_no_other_descriptors(info):
    assert pct(info, "exec", "200", "--", "ls", "/proc/self/fd").stdout.split() == [b"0", b"1", b"2", b"3"]


def test_exec_takes_no_lock(info):
    with containers.Lock(str(state_of(info)), "200"):
        assert pct(info, "exec", "200", "--", "true").status == 0


def test_exec_and_status_work_in_a_container_that_a_backup_locks_and_start_and_stop_do_not(info):
    config = state_of(info) / "containers/200/config"
    text = config.read_text()
    config.write_text(text + "lock: backup\n")
    try:
        assert pct(info, "exec", "200", "--", "true").status == 0
        assert pct(info, "status", "200").stdout == b"status: running\n"
        assert b"lock: backup" in pct(info, "status", "200", "--verbose").stdout
        assert [b"200", b"running", b"backup", b"node-ct200"] in [
            line.split() for line in pct(info, "list").stdout.splitlines()
        ]
        assert (pct(info, "stop", "200").status, pct(info, "stop", "200").stderr) == (
            255,
            b"CT is locked (backup)\n",
        )
    finally:
        config.write_text(text)


def test_exec_costs_little(info):
    def cpu_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = cpu_s()
    for _ in range(10):
        assert pct(info, "exec", "200", "--", "true").status == 0
    assert (cpu_s() - before) / 10 < 0.08


# status, list, config


def test_status_exits_0_for_a_running_and_for_a_stopped_container(info):
    assert (pct(info, "status", "200").status, pct(info, "status", "200").stdout) == (0, b"status: running\n")
    assert (pct(info, "status", "201").status, pct(info, "status", "201").stdout) == (0, b"status: stopped\n")
    assert pct(info, "status", "999").status == 2


def test_list_has_a_lock_column_that_is_blank(info):
    header, *rows = pct(info, "list").stdout.decode().splitlines()
    assert header.split() == ["VMID", "Status", "Lock", "Name"]
    assert [row.split() for row in rows] == [
        ["200", "running", "node-ct200"],
        ["201", "stopped", "node-ct201"],
    ]


def test_list_prints_nothing_at_all_when_there_is_no_container(fresh_node):
    empty = fresh_node()
    assert pct(empty, "stop", "200").status == 0
    shutil.rmtree(state_of(empty) / "containers/200")
    done = pct(empty, "list")
    assert (done.status, done.stdout, done.stderr) == (0, b"", b"")


def test_config_prints_sorted_pairs_and_raw_lxc_lines_last(info):
    config = state_of(info) / "containers/201/config"
    text = config.read_text()
    config.write_text("lxc.mount.entry: /a: b\nlxc.mount.entry: /c\nzzz: 1\n" + text)
    try:
        lines = pct(info, "config", "201").stdout.decode().splitlines()
    finally:
        config.write_text(text)
    assert lines[-2:] == ["lxc.mount.entry: /a: b", "lxc.mount.entry: /c"]
    assert lines[:-2] == sorted(lines[:-2])
    assert "hostname: node-ct201" in lines


# push and pull


def test_push_and_pull_copy_one_file(info, tmp_path):
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(bytes(range(256)) * 1000)
    assert pct(info, "push", "200", str(source), str(rootfs_of(info) / "opt/pushed")).status == 0
    assert pct(info, "pull", "200", "opt/pushed", str(back)).status == 0
    assert back.read_bytes() == source.read_bytes()


def test_a_relative_path_is_relative_to_the_containers_root(info, tmp_path):
    (tmp_path / "here").write_text("x")
    assert pct(info, "push", "200", "here", "tmp/there", cwd=tmp_path).status == 0
    assert (rootfs_of(info) / "tmp/there").read_text() == "x"


def test_push_fails_with_exit_0_when_the_folder_is_not_there(info, tmp_path):
    (tmp_path / "source").write_text("x")
    done = pct(info, "push", "200", str(tmp_path / "source"), "no/such/folder/file")
    assert done.status == 0
    assert b"failed to create file" in done.stderr


def test_push_fails_with_exit_0_when_the_source_is_not_there(info, tmp_path):
    done = pct(info, "push", "200", str(tmp_path / "nothing"), "tmp/never")
    assert done.status == 0
    assert b"failed to open" in done.stderr
    assert not (rootfs_of(info) / "tmp/never").exists()


def test_pushing_a_folder_makes_an_empty_file_and_says_nothing(info, tmp_path):
    done = pct(info, "push", "200", str(tmp_path), "tmp/folder")
    assert (done.status, done.stderr) == (0, b"")
    assert (rootfs_of(info) / "tmp/folder").read_bytes() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_a_short_file_and_says_nothing(info, tmp_path):
    (rootfs_of(info) / "tmp/some").write_text("content")
    done = pct(info, "pull", "200", "tmp/some", "/dev/full")
    assert (done.status, done.stderr) == (0, b"")


def test_push_truncates_in_place_through_links_and_keeps_the_mode(info, tmp_path):
    target, link = rootfs_of(info) / "tmp/target", rootfs_of(info) / "tmp/link"
    target.write_text("something much longer")
    target.chmod(0o600)
    link.symlink_to(target)
    inode = target.stat().st_ino
    (tmp_path / "source").write_text("new")
    assert pct(info, "push", "200", str(tmp_path / "source"), "tmp/link").status == 0
    assert (target.read_text(), target.stat().st_ino, target.stat().st_mode & 0o777) == ("new", inode, 0o600)
    assert link.is_symlink()


@pytest.mark.parametrize(("perms", "mode"), [("755", 0o755), ("0640", 0o640), ("0x1ff", 0o777)])
def test_perms_are_octal_unless_they_say_hex(info, tmp_path, perms, mode):
    (tmp_path / "source").write_text("x")
    target = rootfs_of(info) / "tmp" / f"perms-{perms}"
    assert pct(info, "push", "200", str(tmp_path / "source"), str(target), "--perms", perms).status == 0
    assert target.stat().st_mode & 0o777 == mode


def test_wrong_perms_and_unknown_users_fail_with_exit_0(info, tmp_path):
    (tmp_path / "source").write_text("x")
    bad_mode = pct(info, "push", "200", str(tmp_path / "source"), "tmp/bad", "--perms", "9")
    bad_user = pct(info, "push", "200", str(tmp_path / "source"), "tmp/bad", "--user", "no-such-user")
    assert (bad_mode.status, bad_mode.stderr) == (0, b"invalid mode: '09'\n")
    assert (bad_user.status, bad_user.stderr) == (0, b"failed to get uid for: no-such-user\n")


def test_pull_makes_the_local_file_before_it_looks_for_the_source(info, tmp_path):
    local = tmp_path / "local"
    local.write_text("precious")
    done = pct(info, "pull", "200", "tmp/missing", str(local))
    assert done.status == 0
    assert b"failed to open tmp/missing: No such file or directory" in done.stderr
    assert local.read_text() == ""


def test_push_and_pull_die_for_a_stopped_container_and_touch_nothing(info, tmp_path):
    (tmp_path / "source").write_text("x")
    assert (
        b"can only push files to a running CT"
        in pct(info, "push", "201", str(tmp_path / "source"), "a").stderr
    )
    assert pct(info, "push", "201", str(tmp_path / "source"), "a").status not in (0, 1)
    assert pct(info, "pull", "201", "a", str(tmp_path / "new")).status not in (0, 1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("way", ["absolute", "dots", "link"])
def test_nothing_is_written_or_read_outside_of_the_containers_folder(info, tmp_path, way):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / "source").write_text("theirs")
    link = rootfs_of(info) / "tmp/way-out"
    link.unlink(missing_ok=True)
    link.symlink_to(outside)
    path = {"absolute": str(outside), "dots": "../config", "link": "tmp/way-out"}[way]
    config = (state_of(info) / "containers/200/config").read_text()
    pushed = pct(info, "push", "200", str(tmp_path / "source"), path)
    pulled = pct(info, "pull", "200", path, str(tmp_path / "pulled"))
    for done in (pushed, pulled):
        assert done.status == 0
        assert b"outside of the container's folder" in done.stderr
    assert outside.read_text() == "mine"
    assert (state_of(info) / "containers/200/config").read_text() == config
    assert (tmp_path / "pulled").read_bytes() == b""


def test_a_push_waits_while_another_holds_the_containers_lock(info, tmp_path):
    (tmp_path / "source").write_text("x")
    with containers.Lock(str(state_of(info)), "200"):
        waiting = subprocess.Popen([info.pct, "push", "200", str(tmp_path / "source"), "tmp/waited"])
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.5)
        assert (
            pct(info, "push", "201", str(tmp_path / "source"), "x").status != 0
        )  # another container's lock is free
    assert waiting.wait(10) == 0
    assert (rootfs_of(info) / "tmp/waited").read_text() == "x"


def test_a_lock_that_is_held_too_long_is_an_error(info):
    assert containers.LOCK_TIMEOUT_S == 10.0
    with (
        containers.Lock(str(state_of(info)), "200"),
        pytest.raises(containers.Die, match=r"can't lock file .* - got timeout"),
    ):
        containers.Lock(str(state_of(info)), "200", timeout_s=0.2).__enter__()


@pytest.mark.slow
def test_pct_gives_up_on_a_lock_after_ten_seconds(info, tmp_path):
    (tmp_path / "source").write_text("x")
    with containers.Lock(str(state_of(info)), "200"):
        started = time.monotonic()
        done = pct(info, "push", "200", str(tmp_path / "source"), "tmp/never-in")
        assert 9.5 < time.monotonic() - started < 15
    assert done.status == 11  # EAGAIN
    assert b"can't lock file" in done.stderr
    assert b"got timeout" in done.stderr
