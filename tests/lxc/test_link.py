"""The link between desk and host breaks, stalls and lags: all is resumed or reported, and nothing is lost."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.agent import Agent
from orchestrator.connection import Connection
from orchestrator.container import Container
from orchestrator.errors import LinkLost, RefusedError, TransportError
from orchestrator.fetch import fetch
from orchestrator.inventory import Destination
from orchestrator.logs import show_logs
from tests.faulty_link import Fault, FaultyLink
from tests.lxc.bed import PRIVILEGED, Bed
from tests.lxc.conftest import QUIET
from tests.lxc.desk import Desk
from tests.lxc.jobs import start, until, wait_for
from tests.lxc.lxc import Lxc
from tests.lxc.sshd import descendants

CUTS = 100
SILENCE_TIMEOUT_S = 2.0
# Bytes of every value, in lines of every length, and no end of line at the end.
WRITES_A_LOG = """
import random, sys
made = random.Random(5)
for _ in range(400):
    sys.stdout.buffer.write(made.randbytes(made.randrange(1, 80_000)))
    sys.stdout.buffer.flush()
"""


@pytest.fixture
def link(bed: Bed) -> Iterator[FaultyLink]:
    with FaultyLink(bed.sshd.port) as running:
        yield running


@pytest.fixture
def over(bed: Bed, destination: Destination, link: FaultyLink, tmp_path: Path) -> Iterator[Container]:
    """Container 200 over the faulty link."""
    host = replace(
        destination.host,
        port=link.port,
        known_hosts=str(known_hosts(bed, link, tmp_path)),
        silence_timeout_s=SILENCE_TIMEOUT_S,
    )
    with Connection("bed", host) as connection:
        yield Container(connection, replace(destination, host=host))


@pytest.fixture
def agent_over(agent: Agent, over: Container) -> Agent:
    """The deployed agent, asked over the faulty link."""
    return Agent(over, agent.program)


def known_hosts(bed: Bed, link: FaultyLink, folder: Path) -> Path:
    path = folder / "known_hosts"
    path.write_text(bed.sshd.known_hosts_line(link.port))
    return path


def cuts(seed: int, count: int, toward: str, most_bytes: int) -> list[Fault]:
    moments = random.Random(seed)
    return [Fault("cut", moments.randrange(1_000, most_bytes), toward) for _ in range(count)]  # type: ignore[arg-type]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.timeout(300)
def test_after_a_hundred_cuts_the_log_at_home_is_the_containers_to_the_byte(
    agent: Agent, agent_over: Agent, link: FaultyLink, lxc: Lxc
) -> None:
    run_id = start(agent, WRITES_A_LOG)
    wait_for(agent, run_id, "finished")
    link.faults.extend(cuts(seed=1, count=CUTS, toward="desk", most_bytes=300_000))
    home = bytearray()
    end = show_logs(agent_over, home.extend, run_id=run_id, follow=True)
    assert end.state == "finished"
    assert link.connections > CUTS
    log = (lxc.root / f"opt/dflash/runs/{run_id}/output.log").read_bytes()
    assert sha256(bytes(home)) == sha256(log)
    until(lambda: not lxc.pids("payload/agent logs"))


def test_a_log_that_is_cut_while_it_grows_loses_and_doubles_nothing(
    agent: Agent, agent_over: Agent, link: FaultyLink, lxc: Lxc
) -> None:
    program = (
        "import time\nfor number in range(400):\n    print('line', number, flush=True)\n    time.sleep(0.01)"
    )
    run_id = start(agent, program)
    link.faults.extend(cuts(seed=2, count=8, toward="desk", most_bytes=20_000))
    home = bytearray()
    assert show_logs(agent_over, home.extend, run_id=run_id, follow=True).state == "finished"
    assert bytes(home) == b"".join(b"line %d\n" % number for number in range(400))


def test_an_upload_that_is_cut_is_whole_or_not_there(over: Container, link: FaultyLink, lxc: Lxc) -> None:
    data = random.Random(3).randbytes(3_000_000)
    lxc.run(["rm", "-rf", "/opt/up"])
    lxc.run(["mkdir", "/opt/up"])
    lxc.run(["sh", "-c", "echo old > /opt/up/file"])
    given_up = 0
    for seed in range(3):
        over.connection.close()
        # More cuts than there are tries: each upload ends in an error, wherever it was.
        link.faults.clear()
        link.faults.extend(cuts(seed, count=4, toward="host", most_bytes=3_000_000))
        with contextlib.suppress(LinkLost):
            over.upload(data, "/opt/up/file")
            continue
        given_up += 1
        assert lxc.run(["cat", "/opt/up/file"]).stdout == "old\n"
    link.faults.clear()
    assert given_up
    over.connection.close()
    over.upload(data, "/opt/up/file")
    assert over.sha256("/opt/up/file") == sha256(data)


def test_an_upload_over_a_link_that_breaks_now_and_then_arrives(over: Container, link: FaultyLink) -> None:
    data = random.Random(4).randbytes(2_000_000)
    link.faults.extend(cuts(seed=4, count=2, toward="host", most_bytes=2_000_000))
    told: list[str] = []
    over.connection.notify = told.append
    over.upload(data, "/opt/up-again")
    assert over.sha256("/opt/up-again") == sha256(data)
    again = [text for text in told if "Trying again" in text]
    assert again
    assert all("Trying again to send up-again in" in text for text in again), told


def test_a_fetch_over_a_link_that_breaks_goes_on_where_it_stopped_and_is_whole(
    agent: Agent, agent_over: Agent, over: Container, link: FaultyLink, lxc: Lxc, tmp_path: Path
) -> None:
    run_id = start(agent, WRITES_A_LOG)
    wait_for(agent, run_id, "finished")
    link.faults.extend(cuts(seed=6, count=12, toward="desk", most_bytes=2_500_000))
    with QUIET.step("fetch") as report:
        fetched = fetch(over, agent_over, run_id, tmp_path, report)
    assert link.connections == 13
    log = (lxc.root / f"opt/dflash/runs/{run_id}/output.log").read_bytes()
    assert sha256((fetched.folder / "output.log").read_bytes()) == sha256(log)
    assert not list(fetched.folder.rglob("*.part"))


@pytest.mark.timeout(240)
def test_trainings_over_a_link_that_is_cut_at_random_moments_start_one_job(
    bed: Bed, home: Path, inventory: Callable[..., Path], link: FaultyLink, lxc: Lxc, tmp_path: Path
) -> None:
    job = "import time\nwith open('/opt/cut-starts', 'a') as file:\n    file.write('one\\n')\ntime.sleep(600)"
    settings = {"root": "/opt/cut", "env": {"STANDIN_JOB": job}}
    lxc.run(["rm", "-f", "/opt/cut-starts"])
    Desk(home, inventory(**settings), PRIVILEGED).ok("venv")
    host = {"port": link.port, "known_hosts": str(known_hosts(bed, link, tmp_path))}
    desk = Desk(home, inventory(**settings, host=host), PRIVILEGED)
    moments = random.Random(7)
    for _ in range(5):
        link.faults.clear()
        link.faults.append(Fault("cut", moments.randrange(4_000, 14_000)))
        done = desk.run("train", "--cold", "--detach", "--anyway")
        assert done.status in (0, TransportError.exit_status, RefusedError.exit_status), done.text
    link.faults.clear()
    done = desk.run("train", "--cold", "--detach", "--anyway")
    assert done.status in (0, RefusedError.exit_status), done.text
    active = [run["run_id"] for run in desk.status()["runs"] if run["state"] in ("starting", "running")]
    assert len(active) == 1
    until(lambda: (lxc.root / "opt/cut-starts").exists())
    assert (lxc.root / "opt/cut-starts").read_text() == "one\n"
    desk.ok("stop", active[0], "--grace", "1")


@pytest.mark.parametrize("toward", ["desk", "host"])
def test_a_transfer_that_stalls_is_given_up_within_the_deadline(
    over: Container, link: FaultyLink, toward: str
) -> None:
    over.upload(os.urandom(4_000_000), "/opt/stalls")
    over.connection.close()
    link.faults.append(Fault("stall", 1_000_000, toward))  # type: ignore[arg-type]
    began = time.monotonic()
    command, stdin = (
        (["cat", "/opt/stalls"], b"") if toward == "desk" else (["wc", "-c"], os.urandom(4_000_000))
    )
    with pytest.raises(LinkLost, match="no sign of life for"):
        over.run(command, stdin=stdin, on_stdout=lambda _: None)
    assert time.monotonic() - began < SILENCE_TIMEOUT_S + 4
    assert over.run(["echo", "well"]).stdout == b"well\n"


def test_a_log_that_stalls_is_read_on_when_the_link_is_back(
    agent: Agent, agent_over: Agent, link: FaultyLink
) -> None:
    run_id = start(
        agent, "import time\nfor number in range(60):\n    print(number, flush=True)\n    time.sleep(0.1)"
    )
    home, told = bytearray(), []

    def write(data: bytes) -> None:
        home.extend(data)
        if b"\n20\n" in home and not told:
            link.stall()

    def notify(text: str) -> None:
        told.append(text)
        link.heal()

    assert show_logs(agent_over, write, run_id=run_id, follow=True, notify=notify).state == "finished"
    assert home.split() == [str(number).encode() for number in range(60)]
    assert "fell silent" in told[0]
    assert "The job is not touched by that" in told[0]


def test_a_desk_that_stood_still_goes_on_and_does_not_blame_the_host(
    agent: Agent, home: Path, inventory: Callable[..., Path]
) -> None:
    run_id = start(
        agent, "import time\nfor number in range(80):\n    print(number, flush=True)\n    time.sleep(0.1)"
    )
    desk = Desk(home, inventory(host={"silence_timeout_s": SILENCE_TIMEOUT_S}), PRIVILEGED)
    following = desk.open("logs", "--follow", run_id)
    time.sleep(2)
    # As Ctrl-Z does.
    os.killpg(following.pid, signal.SIGSTOP)
    time.sleep(2 * SILENCE_TIMEOUT_S)
    os.killpg(following.pid, signal.SIGCONT)
    stdout, stderr = following.communicate(timeout=60)
    assert following.returncode == 0
    assert stdout.split() == [str(number).encode() for number in range(80)]
    assert b"silent" not in stderr


def test_a_slow_link_is_not_taken_for_a_dead_one(over: Container, link: FaultyLink) -> None:
    link.lag_s = 0.15
    data = os.urandom(600_000)
    over.upload(data, "/opt/slow")
    link.lag_s = 0.0
    assert over.sha256("/opt/slow") == sha256(data)


def test_a_server_that_accepts_and_says_nothing_is_reported_within_the_connect_timeout(
    bed: Bed, home: Path, inventory: Callable[..., Path]
) -> None:
    desk = Desk(home, inventory(host={"connect_timeout_s": 2}), PRIVILEGED)
    os.kill(bed.sshd.pid, signal.SIGSTOP)
    try:
        done = desk.run("status")
    finally:
        os.kill(bed.sshd.pid, signal.SIGCONT)
    assert done.status == TransportError.exit_status
    assert "no answer in time" in done.text
    assert done.seconds < 6


def test_a_session_whose_server_is_frozen_is_reported_within_the_silence_timeout(
    bed: Bed, over: Container, lxc: Lxc
) -> None:
    before = set(descendants(bed.sshd.pid))
    frozen: list[int] = []

    def freeze(_: bytes) -> None:
        frozen.extend(set(descendants(bed.sshd.pid)) - before)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)

    began = time.monotonic()
    try:
        with pytest.raises(LinkLost, match="no sign of life for"):
            over.run(["sh", "-c", "echo begun; sleep 60"], on_stdout=freeze)
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    assert time.monotonic() - began < SILENCE_TIMEOUT_S + 4
