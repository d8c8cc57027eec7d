"""What every test process starts from, however it was itself started."""

from __future__ import annotations

import os
import signal

import pytest

# Before torch is loaded, as the trainer's entry does: threads that spin while they wait take the core that the other
# test process needs. What is computed here is tiny: one thread is enough, and jobs set how many they want.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    # A shell without job control starts what runs in the background deaf to both, and children inherit that.
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
