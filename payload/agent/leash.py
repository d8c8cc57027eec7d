"""``leash.py PARENT_PID PROGRAM ARGS...``: become PROGRAM, which the kernel kills when the parent dies.

Run as a file in front of everything that the agent runs and waits for, so that nothing of it outlives an agent
that was killed.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the parent-death signal (prctl(2); it survives exec) and exec."""
    parent, argv = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    # The parent may have died before the line above.
    if os.getppid() != parent:
        sys.exit(1)
    try:
        os.execve(argv[0], argv, os.environ)
    except OSError as error:
        sys.stderr.write(f"cannot run {argv[0]}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
