"""Doing again, after a broken link, what may be done twice: and saying what is waited for, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tenacity

from orchestrator.errors import LinkLost

ATTEMPTS_WITHOUT_PROGRESS = 4
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 5.0

T = TypeVar("T")


def repeat(
    work: Callable[[], T],
    what: str,
    notify: Callable[[str], None],
    progress: Callable[[], object] = lambda: None,
) -> T:
    """Do ``work`` again whenever the link broke meanwhile, and return what it returns.

    Only for work that may be repeated: it asks, or does the same thing however often. It is given up, with the last
    :class:`LinkLost`, after four tries in a row between which the value of ``progress`` did not change. Waits grow,
    and are random, so that many desks do not come back at the same moment. ``notify`` is told of each.
    """
    stop = _WithoutProgress(progress)

    def tell(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        wait_s = state.next_action.sleep if state.next_action else 0.0
        why = error.message if isinstance(error, LinkLost) else ""
        notify(f"{why} Trying again {what} in {wait_s:.1f} s")

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(LinkLost),
        stop=stop,
        wait=tenacity.wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
        before_sleep=tell,
        reraise=True,
    )
    return retrying(work)


class _WithoutProgress(tenacity.stop.stop_base):
    """Stops after as many failures in a row without progress."""

    def __init__(self, progress: Callable[[], object]) -> None:
        self._progress = progress
        self._seen = progress()
        self._failures = 0

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        now = self._progress()
        self._failures = 1 if now != self._seen else self._failures + 1
        self._seen = now
        return self._failures >= ATTEMPTS_WITHOUT_PROGRESS
