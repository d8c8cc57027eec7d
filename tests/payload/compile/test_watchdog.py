import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from payload.compile.watchdog import COMPILE_LOCK, HUNG_EXIT_STATUS, lock_owner, who_holds_what

REPO = Path(__file__).parents[3]

# Two threads as in the deadlock: one holds dynamo's lock, the other waits for it, and the main thread for both.
HANGS = """
import sys, threading
from pathlib import Path
from torch._dynamo import convert_frame
from payload.compile.watchdog import watch

held = threading.Event()

def hold():
    with convert_frame.compile_lock:
        held.set()
        threading.Event().wait()

def wait():
    held.wait()
    with convert_frame.compile_lock:
        pass

watch(1.0, Path(sys.argv[1]))
threads = [threading.Thread(target=hold, name="holder", daemon=True), threading.Thread(target=wait, name="waiter")]
for thread in threads:
    thread.start()
threads[1].join()
"""


def test_a_process_that_hangs_is_ended_and_says_who_holds_what_and_who_waits(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    report = tmp_path / "hung.json"
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "hangs.py"), str(report)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        timeout=60,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == HUNG_EXIT_STATUS, ended.stderr.decode()
    states = {state["name"]: state for state in json.loads(report.read_text())}
    assert states["holder"]["holds"] == [COMPILE_LOCK]
    assert states["waiter"]["waits_for"] == COMPILE_LOCK
    assert states["waiter"]["holds"] == []
    assert states["MainThread"]["waits_for"] == "another thread of the program"
    assert states["waiter"]["frames"][-1].endswith(" wait")


def test_the_calling_thread_is_not_part_of_its_own_report():
    assert threading.current_thread().name not in [state.name for state in who_holds_what()]


@pytest.mark.parametrize("times", [1, 3])
def test_the_owner_of_a_reentrant_lock_is_known_while_it_is_held(times):
    lock = threading.RLock()
    assert lock_owner(lock) is None
    for _ in range(times):
        lock.acquire()
    assert lock_owner(lock) == threading.get_ident()
    for _ in range(times):
        lock.release()
    assert lock_owner(lock) is None
