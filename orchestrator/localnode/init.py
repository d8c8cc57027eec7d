"""The first process of a container: parent of every command in it, and its end.

A folder has no PID namespace, and any environment marker is gone after ``env -i``. What an unprivileged process can
have is PR_SET_CHILD_SUBREAPER: whatever starts below this process stays below it, however often it forks, calls
setsid or loses its parent. So ``pct exec`` hands its argv, environment and standard streams over a socket, and the
command becomes a child of this process. Two things follow that hold for a real container as well: killing ``pct``
does not touch the command, and stopping the container kills all of it.

A request is one message on a stream socket: its kind, the length of its body, the body, and for ``exec`` three file
descriptors (standard input, output, error). The body of ``exec`` is NUL-separated: the number of arguments, the
arguments, the environment. The answer to ``exec`` is the command's wait status as a decimal line. ``stop`` is done
when nothing answers at the socket any more.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import time

from orchestrator.localnode import layout, process

EXEC = b"x"
STOP = b"s"
HEADER_BYTES = 12  # kind, 10 digits, newline
STOP_TIMEOUT_S = 10.0
_BACKLOG = 512
_PR_SET_CHILD_SUBREAPER = 36


def address(folder: str) -> tuple[str, int]:
    """A path to the container's socket that fits in the 108 bytes of a socket address, and the open fd it needs."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{fd}/{layout.INIT_SOCKET}", fd


def connect(folder: str) -> socket.socket:
    """Connect to the init of the container in ``folder``; OSError when the container does not run."""
    path, fd = address(folder)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    finally:
        os.close(fd)
    return connection


def send(connection: socket.socket, kind: bytes, body: bytes = b"", fds: tuple[int, ...] = ()) -> None:
    """Send one request."""
    header = b"%s%010d\n" % (kind, len(body))
    if fds:
        socket.send_fds(connection, [header], fds)
        connection.sendall(body)
    else:
        connection.sendall(header + body)


def main(state: str, container_id: str, ready_fd: int) -> None:
    """Run the container ``container_id`` until it is stopped. ``ready_fd`` gets a line once it answers."""
    process.daemonize()
    folder = layout.container_folder(state, container_id)
    _become_subreaper()
    listener = _listen(folder)
    os.chdir(os.path.join(folder, layout.ROOTFS))
    os.write(ready_fd, b"ready\n")
    os.close(ready_fd)
    _serve(listener, os.path.join(folder, layout.ROOTFS))
    os.unlink(os.path.join(folder, layout.INIT_SOCKET))


def _become_subreaper() -> None:
    import ctypes  # costs 10 ms, which only this process needs to pay

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def _listen(folder: str) -> socket.socket:
    # Whoever starts a container holds its lock and has seen that no init answers, so a socket here is a leftover.
    path, fd = address(folder)
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.close(fd)
    listener.listen(_BACKLOG)
    return listener


def _serve(listener: socket.socket, rootfs: str) -> None:
    waiting: dict[int, socket.socket] = {}  # pid of a command -> whoever waits for its end
    init_pid = os.getpid()
    stopping = False

    def stop(_signal: int, _frame: object) -> None:
        nonlocal stopping
        stopping = True

    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_read, False)
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(wakeup_read, select.POLLIN)
    while not stopping:
        for fd, _ in poll.poll():
            if fd == wakeup_read:
                os.read(wakeup_read, 4096)
                continue
            try:
                connection, _ = listener.accept()
                pid = os.fork()
            except OSError as error:
                print(f"request refused: {error}", file=sys.stderr, flush=True)  # noqa: T201
                time.sleep(0.05)
                continue
            if pid == 0:
                signal.set_wakeup_fd(-1)
                _handle(connection, rootfs, init_pid)
            waiting[pid] = connection
        _reap(waiting)
    # The listener stays open until the last process is gone: as long as it does, the container counts as running.
    _kill_all(waiting)


def _reap(waiting: dict[int, socket.socket]) -> bool:
    """Collect the children that ended, and tell who waits for them. False when there is no child left at all."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        connection = waiting.pop(pid, None)
        if connection is not None:
            try:
                connection.send(b"%d\n" % status, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                pass  # pct was killed meanwhile; its command ran on without it
            connection.close()


def _kill_all(waiting: dict[int, socket.socket]) -> None:
    """KILL every descendant until none is left.

    A walk through /proc is no snapshot: processes fork and change parents meanwhile. That there is no child left is
    certain, and means that there is no descendant: whoever loses its parent becomes a child of this process.
    """
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while _reap(waiting) and time.monotonic() < deadline:
        for pid in process.descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.005)


def _handle(connection: socket.socket, rootfs: str, init_pid: int) -> None:
    """In a child of init: read one request and become what it asks for. Never returns."""
    status = 1
    try:
        header, fds, _, _ = socket.recv_fds(connection, HEADER_BYTES, 3)
        if header:  # nothing at all is someone who only looked whether the container runs
            header += _receive(connection, HEADER_BYTES - len(header))
        if header[:1] == STOP:
            if os.getppid() == init_pid:  # otherwise it is gone already, and its pid may be somebody else's
                os.kill(init_pid, signal.SIGTERM)
            status = 0
        elif header[:1] == EXEC and len(fds) == 3:
            argv, environment = _parse(_receive(connection, int(header[1:])))
            _exec(argv, environment, fds, rootfs)
    except (OSError, ValueError) as error:
        print(f"request failed: {error}", file=sys.stderr, flush=True)  # noqa: T201 - goes to the container's log
    finally:
        os._exit(status)


def _receive(connection: socket.socket, size: int) -> bytes:
    body = bytearray()
    while len(body) < size:
        data = connection.recv(min(1 << 20, size - len(body)))
        if not data:
            raise OSError(errno.EPIPE, "the request ended early")
        body += data
    return bytes(body)


def _parse(body: bytes) -> tuple[list[bytes], dict[bytes, bytes]]:
    count, *rest = body.split(b"\0")
    argv, pairs = rest[: int(count)], rest[int(count) :]
    return argv, dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)


def _exec(argv: list[bytes], environment: dict[bytes, bytes], fds: list[int], rootfs: str) -> None:
    """Become the command, as lxc-attach does: 127 when there is none, 126 when it cannot be executed."""
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    # A session of its own, as sshd gives it, so that a signal to "my process group" stays with the command.
    os.setsid()
    os.umask(0o022)
    os.chdir(rootfs)
    for number in (
        signal.SIGCHLD,
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):
        signal.signal(number, signal.SIG_DFL)
    try:
        _execvp(argv, environment)
    except OSError as error:
        name = os.fsdecode(argv[0])
        message = f'lxc-attach: lxc_attach_run_command: {error.strerror} - Failed to exec "{name}"\n'
        os.write(2, os.fsencode(message))
        os._exit(127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126)


def _execvp(argv: list[bytes], environment: dict[bytes, bytes]) -> None:
    """execvp(3) with the command's own PATH, its fallback for scripts without ``#!`` included."""
    if not argv[0]:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
    candidates = [argv[0]]
    if b"/" not in argv[0]:
        candidates = [
            os.path.join(part, argv[0]) for part in environment.get(b"PATH", b"/bin:/usr/bin").split(b":")
        ]
    for path in candidates:
        if os.access(path, os.X_OK):
            os.execve(b"/bin/sh", [b"/bin/sh", path, *argv[1:]], environment)
