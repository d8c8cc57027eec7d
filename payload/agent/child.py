"""A program that the agent runs and waits for: its lines as they come, its end in time, nothing left of it."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Callable, Deque, List, Mapping, Optional, Tuple

from payload.agent.interruption import signals_noted
from payload.agent.processes import become_subreaper, descendants, end, open_handle
from payload.errors import PayloadError

_LEASH = Path(__file__).resolve().with_name("leash.py")
_TAIL_LINES = 20
_END_GRACE_S = 2.0
_POLL_S = 0.1
# One line of a hostile or broken program must not fill the agent's memory.
_MAX_LINE_BYTES = 16 * 1024 * 1024


@dataclass
class Outcome:
    """How a child ended. ``returncode`` is as in subprocess; ``stderr_tail`` its last lines on stderr."""

    returncode: int = 0
    timed_out: bool = False
    stderr_tail: Deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))


class NotRun(PayloadError):
    """A program that the kernel did not run; ``reason`` is the kernel's."""

    def __init__(self, program: str, reason: str) -> None:
        super().__init__(f"cannot run {program}: {reason}")
        self.reason = reason


def run_child(
    argv: List[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    request: bytes = b"",
    on_stdout: Callable[[bytes], None],
    on_stderr: Callable[[bytes], None],
    timeout_s: Optional[float],
) -> Outcome:
    """Run ``argv`` (a program by absolute path) in ``folder`` with exactly ``environment``, and wait for its end.

    ``request`` is its stdin. Its lines go to ``on_stdout`` and ``on_stderr`` with their newline; one of more
    than 16 MiB comes in parts.
    When it ends, or after ``timeout_s``, or when the caller is gone, its whole tree is ended, reparented processes
    included; should the agent be killed, the kernel kills the program. Raises NotRun when it cannot be run.
    """
    become_subreaper()
    outcome = Outcome()
    failures: List[BaseException] = []

    def keep_stderr(line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        if text:
            outcome.stderr_tail.append(text)
        on_stderr(line)

    # Nothing may cut the ending short: what it has not killed by then would stay.
    with signals_noted() as signals:
        process, complaint = _spawn(argv, environment, folder)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        threads = [
            _writer(process.stdin, request),
            _reader(process.stdout, on_stdout, failures),
            _reader(process.stderr, keep_stderr, failures),
        ]
        try:
            for thread in threads:
                thread.start()
            outcome.timed_out = not _wait(process, timeout_s, lambda: bool(failures or signals))
        finally:
            end(lambda: descendants(os.getpid()), _END_GRACE_S)
            process.wait()
            with os.fdopen(complaint, "rb") as why:
                reason = why.read().decode("utf-8", "replace")
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    if reason:
        raise NotRun(argv[0], reason)
    outcome.returncode = process.returncode
    return outcome


def _spawn(
    argv: List[str], environment: Mapping[str, str], folder: Path
) -> Tuple[subprocess.Popen[bytes], int]:
    """Start ``argv`` on the leash. Also returns the descriptor on which the leash says why it cannot be run."""
    complaint, writer = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_LEASH), str(os.getpid()), str(writer), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
            pass_fds=(writer,),
        )
    except BaseException:
        os.close(complaint)
        raise
    finally:
        os.close(writer)
    return process, complaint


def _wait(
    process: subprocess.Popen[bytes], timeout_s: Optional[float], interrupted: Callable[[], bool]
) -> bool:
    """Wait for its end, or until ``interrupted`` says so; False when neither came within ``timeout_s``."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    handle = open_handle(process.pid)
    try:
        while process.poll() is None and not interrupted():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            if handle is not None:
                # By the handle its end is noticed at once, by polling within 50 ms.
                select.select([handle], [], [], _POLL_S)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        return True
    finally:
        if handle is not None:
            os.close(handle)


def _writer(stream: IO[bytes], data: bytes) -> threading.Thread:
    def write() -> None:
        with contextlib.suppress(BrokenPipeError):
            stream.write(data)
        with contextlib.suppress(BrokenPipeError):
            stream.close()

    return threading.Thread(target=write, daemon=True)


def _reader(
    stream: IO[bytes], handle: Callable[[bytes], None], failures: List[BaseException]
) -> threading.Thread:
    def read() -> None:
        try:
            with stream:
                while line := stream.readline(_MAX_LINE_BYTES):
                    handle(line)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            failures.append(error)

    return threading.Thread(target=read, daemon=True)
