"""Start a daemon and wait until it is ready.

The daemon is handed the write end of a pipe as its last argument. It calls ``process.daemonize``, which lets the
process that was started here end at once, and writes a line when it is ready. The end of the pipe without a line
means that it died, so nobody waits in vain.
"""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Mapping, Sequence

TIMEOUT_S = 30.0


def launch(argv: Sequence[str], *, environment: Mapping[str, str], cwd: str, log: str) -> str:
    """Run ``argv`` plus the number of the ready pipe; the daemon's line, or "" when it did not become ready.

    Standard input is empty; both outputs are appended to the file ``log``.
    """
    ready_read, ready_write = os.pipe()
    try:
        with open(log, "ab") as log_file:
            launched = subprocess.Popen(
                [*argv, str(ready_write)],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=dict(environment),
                cwd=cwd,
                start_new_session=True,
                pass_fds=(ready_write,),
            )
        os.close(ready_write)
        ready_write = -1
        readable, _, _ = select.select([ready_read], [], [], TIMEOUT_S)
        line = os.read(ready_read, 64) if readable else b""
        launched.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        launched.kill()
        launched.wait()
        line = b""
    finally:
        os.close(ready_read)
        if ready_write >= 0:
            os.close(ready_write)
    return line.decode("ascii", "replace").strip()
