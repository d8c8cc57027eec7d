"""``pct``: Proxmox VE's container command, over folders.

Verbs: exec, push, pull, status, list, config, start, stop. Traps are part of the contract: see the tests, which
name each. Exit statuses: the command's own for ``exec``; errno or 255 for a missing or stopped container; 255 for a
command line that is not understood.

The real ``pct exec`` replaces itself by lxc-attach, which stays outside as the command's parent and passes its exit
status on. Here ``pct`` stays in lxc-attach's place, while the command is a child of the container's init: killing
``pct`` leaves the command running in both.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable

from orchestrator.container_id import is_container_id
from orchestrator.localnode import containers, init, layout, options

HOST_PATH = b"/sbin:/bin:/usr/sbin:/usr/bin"
CLEAR_PATH = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_REPLACED = (b"PATH", b"container", b"SSL_CERT_FILE", b"SSL_CERT_DIR")


def main(state: str, arguments: list[str]) -> int:
    """Run one ``pct`` command over the node in ``state``; the exit status."""
    if not arguments:
        return _fail("ERROR: no command specified\n" + _usage(), 255)
    verb, *words = arguments
    if verb not in _VERBS:
        return _fail(f"ERROR: unknown command 'pct {verb}'\n" + _usage(), 255)
    run, synopsis = _VERBS[verb]
    try:
        return run(state, words)
    except options.UsageFault as fault:
        return _fail(f"{fault}\npct {verb} {synopsis}", 255)
    except containers.Die as died:
        return _fail(str(died), died.exit_status)


def _exec(state: str, words: list[str]) -> int:
    positional, given = options.parse(words, booleans=("keep-env",))
    container_id, *argv = _arguments(positional, 1, None)
    containers.load_config(state, container_id)
    try:
        connection = init.connect(layout.container_folder(state, container_id))
    except OSError as error:
        raise containers.Die(f"container '{container_id}' not running!", error.errno or 0) from None
    with connection:
        if not argv:
            raise containers.Die("missing command")
        return _attach(connection, argv, _environment(keep=given.get("keep-env", "1") == "1"))


def _environment(keep: bool) -> list[bytes]:
    """What lxc-attach gives the command: the host session's environment with pct's own PATH, or almost none.

    Read from the kernel, because Python adds LC_CTYPE to ``os.environ`` in a C locale.
    """
    if not keep:
        return [b"PATH=" + CLEAR_PATH, b"container=lxc"]
    with open("/proc/self/environ", "rb") as file:
        pairs = file.read().split(b"\0")
    kept = [pair for pair in pairs if pair and pair.partition(b"=")[0] not in _REPLACED]
    return [*kept, b"PATH=" + HOST_PATH, b"container=lxc"]


def _attach(connection: socket.socket, argv: list[str], environment: list[bytes]) -> int:
    """Run ``argv`` in the container on this process's standard streams; its exit status, or 128 + its signal."""
    body = b"\0".join([b"%d" % len(argv), *map(os.fsencode, argv), *environment])
    try:
        init.send(connection, init.EXEC, body, (0, 1, 2))
        answer = _receive_line(connection)
    except OSError as error:
        return _fail(f"lxc-attach: failed to attach: {error.strerror}", 1)
    if not answer:
        return _fail("lxc-attach: the container ended before the command", 1)
    status = int(answer)
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _receive_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(64)
        if not data:
            return b""
        line += data
    return line


def _push(state: str, words: list[str]) -> int:
    from orchestrator.localnode import transfer  # imports that only push and pull need

    positional, given = options.parse(words, strings=("perms", "user", "group"))
    container_id, source, destination = _arguments(positional, 3, 3)
    containers.load_config(state, container_id)
    with containers.Lock(state, container_id):
        _require_running(state, container_id, "can only push files to a running CT")
        transfer.push(_rootfs(state, container_id), source, destination, given)
    return 0


def _pull(state: str, words: list[str]) -> int:
    from orchestrator.localnode import transfer

    positional, given = options.parse(words, strings=("perms", "user", "group"))
    container_id, source, destination = _arguments(positional, 3, 3)
    containers.load_config(state, container_id)
    with containers.Lock(state, container_id):
        _require_running(state, container_id, "can only pull files from a running VM")
        transfer.pull(_rootfs(state, container_id), source, destination, given)
    return 0


def _status(state: str, words: list[str]) -> int:
    positional, given = options.parse(words, booleans=("verbose",))
    (container_id,) = _arguments(positional, 1, 1)
    config = dict(containers.load_config(state, container_id))
    facts = {"status": "stopped" if containers.why_stopped(state, container_id) else "running"}
    if given.get("verbose") == "1":
        facts |= {"name": config.get("hostname", f"CT{container_id}"), "type": "lxc", "vmid": container_id}
        if "lock" in config:
            facts["lock"] = config["lock"]
    for key in sorted(facts):
        _say(f"{key}: {facts[key]}")
    return 0


def _list(state: str, words: list[str]) -> int:
    _arguments(options.parse(words)[0], 0, 0)
    for number, container_id in enumerate(layout.container_ids(state)):
        if number == 0:
            _say(_row("VMID", "Status", "Lock", "Name"))
        config = dict(containers.load_config(state, container_id))
        status = "stopped" if containers.why_stopped(state, container_id) else "running"
        name = config.get("hostname", f"CT{container_id}")
        _say(_row(container_id, status, config.get("lock", ""), name))
    return 0


def _row(container_id: str, status: str, lock: str, name: str) -> str:
    return f"{container_id:<10} {status:<10} {lock:<12} {name:<20}"


def _config(state: str, words: list[str]) -> int:
    (container_id,) = _arguments(options.parse(words, booleans=("current",))[0], 1, 1)
    pairs = containers.load_config(state, container_id)
    for key, value in sorted(pair for pair in pairs if not pair[0].startswith("lxc.")):
        _say(f"{key}: {value}")
    for key, value in (pair for pair in pairs if pair[0].startswith("lxc.")):
        _say(f"{key}: {value}")
    return 0


def _start(state: str, words: list[str]) -> int:
    (container_id,) = _arguments(options.parse(words)[0], 1, 1)
    containers.load_config(state, container_id)
    with containers.Lock(state, container_id):
        containers.check_lock(state, container_id)
        if not containers.why_stopped(state, container_id):
            raise containers.Die(f"CT {container_id} already running")
        containers.start(state, container_id)
    return 0


def _stop(state: str, words: list[str]) -> int:
    (container_id,) = _arguments(options.parse(words)[0], 1, 1)
    containers.load_config(state, container_id)
    with containers.Lock(state, container_id):
        containers.check_lock(state, container_id)
        if containers.why_stopped(state, container_id):
            raise containers.Die(f"CT {container_id} not running")
        containers.stop(state, container_id)
    return 0


_VERBS: dict[str, tuple[Callable[[str, list[str]], int], str]] = {
    "exec": (_exec, "<vmid> [<extra-args>] [OPTIONS]"),
    "push": (_push, "<vmid> <file> <destination> [OPTIONS]"),
    "pull": (_pull, "<vmid> <path> <destination> [OPTIONS]"),
    "status": (_status, "<vmid> [OPTIONS]"),
    "list": (_list, ""),
    "config": (_config, "<vmid> [OPTIONS]"),
    "start": (_start, "<vmid>"),
    "stop": (_stop, "<vmid>"),
}


def _arguments(positional: list[str], least: int, most: int | None) -> list[str]:
    """The positional arguments, of which the first is a container id. Raises :class:`options.UsageFault`."""
    if len(positional) < least:
        raise options.UsageFault("400 not enough arguments")
    if most is not None and len(positional) > most:
        raise options.UsageFault("400 too many arguments")
    if least and not is_container_id(positional[0]):
        raise options.UsageFault(
            "400 Parameter verification failed.\nvmid: invalid format - value does not look like a valid VM ID"
        )
    return positional


def _require_running(state: str, container_id: str, message: str) -> None:
    number = containers.why_stopped(state, container_id)
    if number:
        raise containers.Die(message, number)


def _rootfs(state: str, container_id: str) -> str:
    return os.path.join(layout.container_folder(state, container_id), layout.ROOTFS)


def _usage() -> str:
    return "USAGE: pct <COMMAND> [ARGS] [OPTIONS]\n" + "".join(
        f"       pct {v} {s}\n" for v, (_, s) in _VERBS.items()
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _fail(message: str, status: int) -> int:
    sys.stderr.write(message.rstrip("\n") + "\n")
    return status
