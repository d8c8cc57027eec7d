"""The job's first process: torchrun with one process per GPU, and one clear word at the end when a rank failed.

Takes torchrun's arguments::

    python -m payload.trainer.launch --standalone --nproc-per-node N -m payload.trainer --spec spec.json

A failure is in the run's ``metrics.jsonl`` too. Exit status: 0 finished, 1 failed, 143 stopped by SIGTERM after a
checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args
from torch.distributed.run import run as torchrun

from payload.trainer.failure import EXIT_FAILED, EXIT_STOPPED, WORD_VARIABLE, Failure, told


def main(arguments: Sequence[str]) -> int:
    """Run the job to its end; returns the exit status."""
    # torchrun's own report of a failure names its processes and files; what a person needs is said below.
    logging.disable(logging.CRITICAL)
    # Whoever hands the job a longer grace than torchrun's 30 s decides when its ranks are killed.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    # A rank whose peer has left would warn of each connection that it lost.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(prefix="dflash-job-") as folder:
        word = Path(folder, "failure.json")
        os.environ[WORD_VARIABLE] = str(word)
        try:
            torchrun(parse_args(list(arguments)))
        except SignalException:
            failure = told(word)
        except ChildFailedError as error:
            failure = told(word)
            if failure is None and has_ended(metrics_of(arguments)):
                return EXIT_FAILED
            failure = failure or death(error.failures)
        else:
            return 0
    if failure is None:
        return EXIT_STOPPED
    metrics = metrics_of(arguments)
    if metrics is not None:
        record(metrics, failure)
    sys.stdout.write(f"{failure}\n")
    sys.stdout.flush()
    return EXIT_FAILED


def metrics_of(arguments: Sequence[str]) -> Path | None:
    """The metrics of the run whose spec the arguments name; None when they name none."""
    if "--spec" not in arguments:
        return None
    return Path(arguments[arguments.index("--spec") + 1]).parent / "metrics.jsonl"


def has_ended(metrics: Path | None) -> bool:
    """Whether the run went through to a verdict of its own, be it that it failed."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        if metrics is not None:
            last = json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])
            return bool(last.get("event") == "end" and last.get("verdict"))
    return False


def record(metrics: Path, failure: Failure) -> None:
    """Put the failure at the end of a run's metrics, where whoever asks for the run's state finds it."""
    place = f"{failure.who}: " if failure.who else ""
    line = {"event": "end", "step": None, "time": round(time.time(), 3), "outcome": "failed"}
    # A full disk is no reason to keep the failure from the log.
    with contextlib.suppress(OSError), metrics.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**line, "verdict": f"{place}{failure.message}"}) + "\n")


def death(failures: Mapping[int, ProcessFailure]) -> Failure | None:
    """What became of ranks that left no word, by their exit codes; None when they were only told to stop."""
    killed = {rank: -failure.exitcode for rank, failure in failures.items() if failure.exitcode < 0}
    if killed:
        rank, number = min(killed.items())
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hint = "SIGKILL is what a machine out of memory sends." if number == signal.SIGKILL else ""
        return Failure(f"rank {rank}", f"its process was ended by {name}.", hint)
    strange = {
        rank: failure.exitcode for rank, failure in failures.items() if failure.exitcode != EXIT_STOPPED
    }
    if not strange:
        return None
    rank, code = min(strange.items())
    return Failure(f"rank {rank}", f"its process ended with exit status {code} and without a word.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
