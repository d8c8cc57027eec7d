"""``leash.py PARENT_PID DESCRIPTOR PROGRAM ARGS...``: become PROGRAM, which the kernel kills when the parent dies.

Run as a file in front of everything that the agent runs and waits for, so that nothing of it outlives an agent
that was killed. Why PROGRAM cannot be run is written to DESCRIPTOR, which PROGRAM does not inherit: its own words and
its exit status stay its own.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """From now on the kernel kills this process when its parent dies (prctl(2); it survives exec)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    # The parent may have died before the line above.
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Set the parent-death signal and exec."""
    parent, failure, argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(failure, False)
    die_with(parent)
    try:
        os.execve(argv[0], argv, os.environ)
    except OSError as error:
        os.write(failure, str(error.strerror).encode())
        sys.exit(127)


if __name__ == "__main__":
    main()
