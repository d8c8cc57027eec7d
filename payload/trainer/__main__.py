"""The job, as torchrun starts it on every rank::

    python -m payload.trainer.launch --standalone --nproc-per-node N -m payload.trainer --spec spec.json

The run's folder is the one that holds the spec. Exit status: 0 finished, 1 failed, 143 stopped by SIGTERM after a
checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="payload.trainer", description="Train a DFlash drafter.")
    parser.add_argument("--spec", type=Path, required=True, help="the run's spec.json")
    parser.add_argument("--cold-ok", action="store_true", help="start although the compile cache is not warm")
    arguments = parser.parse_args()
    _prepare_environment()
    from payload.trainer.job import run_job

    status = run_job(arguments.spec, cold_ok=arguments.cold_ok)
    if status != 0:
        # Others may be gone already: what torch would still do in order at exit could wait for them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _prepare_environment() -> None:
    """What must be set before torch is imported."""
    # Every rank sees its own GPU as cuda:0, so that all of them share one compile-cache entry.
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)
    elif local_rank < len(allowed.split(",")):
        os.environ["CUDA_VISIBLE_DEVICES"] = allowed.split(",")[local_rank]
    # Threads that spin while they wait take the core that another rank needs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Progress bars of libraries fill a log that nobody watches as a terminal.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


if __name__ == "__main__":
    sys.exit(main())
