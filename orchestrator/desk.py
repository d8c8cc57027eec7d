"""torch and the payload's packages in the desk's own venv: what the tests need and the controller does not.

The same code that sets up a container's venv decides where torch comes from.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import uv

from orchestrator.bootstrap import say
from orchestrator.deploy import PAYLOAD
from orchestrator.localnode.desk_pip import desk_index, desk_torch
from orchestrator.wheelhouse import index_arguments, index_environment


def main() -> int:
    """Install torch (a CPU build) and payload/requirements.txt beside this Python; returns the exit status."""
    started = time.monotonic()
    index, torch = desk_index(), desk_torch()
    say(f"installing torch {torch.version} and the payload's packages (some 400 MB the first time)")
    done = subprocess.run(
        [
            *(uv.find_uv_bin(), "pip", "install", "--no-config", "--quiet", "--python", sys.executable),
            *index_arguments(index),
            *(("--torch-backend", torch.backend) if torch.backend else ()),
            *(f"torch=={torch.version}", "-r", str(PAYLOAD / "requirements.txt")),
        ],
        env=os.environ | index_environment(index),
        check=False,
    )
    if done.returncode != 0:
        sys.stderr.write("error: the payload's packages could not be installed; uv's words are above.\n")
        return 1
    say(f"torch is there ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
