"""How a rank that fails is heard: one clear word for the person, and a sign by which the other ranks leave quietly.

The word goes to the launcher (`payload.trainer.launch`), which says it last, when every rank has left; without a
launcher the rank says it itself. The sign is a key in the job's store. A rank may wait for the failed one in a
collective, in a kernel or in the store, where it cannot look: a thread of its own looks, and ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

EXIT_FAILED = 1
EXIT_STOPPED = 128 + signal.SIGTERM

WORD_VARIABLE = "DFLASH_FAILURE_FILE"
"""Names the file into which a rank puts its word; set by the launcher."""

_SIGN = "left early"
_LOOK_EVERY_S = 0.5
_GRACE_S = 5.0
"""How long a rank may take to leave by itself once another has failed."""


@dataclass(frozen=True)
class Failure:
    """``who`` is the rank in words, empty in a job of one; ``message`` and ``hint`` as in ``PayloadError``."""

    who: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        place = f"{self.who}: " if self.who else ""
        hint = "".join(f"\n  {line}" for line in self.hint.splitlines())
        return f"error: {place}{self.message}{hint}"


def tell(failure: Failure) -> None:
    """Leave the word for the launcher, unless another rank was first; without a launcher put it on the log."""
    path = os.environ.get(WORD_VARIABLE)
    if path is None:
        sys.stdout.write(f"{failure}\n")
        sys.stdout.flush()
        return
    beside = Path(f"{path}.{os.getpid()}")
    beside.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    try:
        # A link is there whole or not at all, and does not replace one that is there.
        os.link(beside, path)
    except FileExistsError:
        pass
    finally:
        beside.unlink()


def told(path: Path) -> Failure | None:
    """The first word that a rank left; None when none did."""
    return Failure(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


class EarlyEnd:
    """The sign that a rank left before the run's end, and with which exit status."""

    def __init__(self, store: dist.Store) -> None:
        # A connection of its own: the rank's may be held by a call that waits.
        self._store = store.clone()  # type: ignore[attr-defined]
        self._over = threading.Event()

    def give(self, status: int) -> None:
        """Let the other ranks know; only the first sign counts."""
        # Without the store its host has left, and the others know.
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(_SIGN, "", str(status))

    def status(self) -> int | None:
        """The exit status of the rank that left early; None when none did.

        A store that is gone means that its host has left.
        """
        try:
            return int(self._store.get(_SIGN)) if self._store.check([_SIGN]) else None
        except RuntimeError:
            return EXIT_FAILED

    def await_status(self, patience_s: float, or_else: Callable[[], bool]) -> int | None:
        """Like `status`, with patience; None also as soon as ``or_else`` says so."""
        deadline = time.monotonic() + patience_s
        while (status := self.status()) is None and time.monotonic() < deadline and not or_else():
            time.sleep(0.05)
        return status

    def watch(self, let_finish: Callable[[], None] = lambda: None) -> None:
        """From now on, end this process when another rank left early and this one does not leave by itself.

        ``let_finish`` is called right before: it waits for what should not be cut off.
        """
        look = threading.Thread(target=self._look, args=(let_finish,), name="early-end", daemon=True)
        look.start()

    def unwatch(self) -> None:
        """This rank is about to leave."""
        self._over.set()

    def _look(self, let_finish: Callable[[], None]) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            status = self.status()
            if status is not None:
                if not self._over.wait(_GRACE_S):
                    let_finish()
                    os._exit(status)
                return
