import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.fx._symbolic_trace as symbolic_trace

from payload.compile import race
from payload.compile.fx_flag import FlagHome, inspect_flag
from payload.compile.race import WHAT, Finding, Report, expected_outcomes, main
from payload.compile.race_scenarios import SCENARIOS
from tests.payload.compile.builders import needs_compiler

HOME = inspect_flag(symbolic_trace).home


def finding(scenario="cold-threads", outcome="passed", expected=("passed",)):
    return Finding(scenario, outcome, expected, "detail", 1.0)


def report(*findings, guard=False):
    return Report("2.11.0", "70d99e998b4955", "cpu", guard, "global", findings)


def test_every_scenario_that_is_described_can_be_run():
    assert list(WHAT) == list(SCENARIOS)


@pytest.mark.parametrize("scenario", WHAT)
@pytest.mark.parametrize("home", FlagHome)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_under_the_guard_nothing_but_passing_is_expected(scenario, home, device):
    assert expected_outcomes(scenario, True, device, home) == ("passed",)


def test_on_stock_torch_what_is_expected_follows_from_where_the_flag_is():
    assert expected_outcomes("traced-call", False, "cpu", FlagHome.GLOBAL) == ("raised",)
    assert expected_outcomes("traced-call", False, "cpu", FlagHome.THREAD_LOCAL) == ("passed",)
    assert expected_outcomes("lazy-backward", False, "cpu", HOME) == ("passed",)
    assert expected_outcomes("lazy-backward", False, "cuda", FlagHome.GLOBAL) == ("hung",)


def test_the_verdict_names_the_build_and_every_scenario_that_affects_it():
    text = report(finding("traced-call", "raised"), finding("lazy-backward", "hung"), finding()).verdict
    assert text == (
        "torch 2.11.0 (git 70d99e998b, tracing flag global) on cpu is AFFECTED: "
        "traced-call raised; lazy-backward hung"
    )
    assert report(finding(), finding()).verdict.endswith("not affected by any of the 2 scenarios")
    assert "the guard holds, all 1 scenarios passed" in report(finding(), guard=True).verdict
    assert "THE GUARD FAILS in cold-threads" in report(finding(outcome="hung"), guard=True).verdict


def test_the_deterministic_races_are_shown_for_real_on_this_torch(capfd):
    status = main(["--device", "cpu", "--only", "traced-call", "--only", "traced-module", "--json"])
    told = json.loads(capfd.readouterr().out)
    outcomes = [each["outcome"] for each in told["findings"]]
    assert outcomes == ["raised" if HOME is FlagHome.GLOBAL else "passed", "raised"]
    assert status == 0
    assert told["as_expected"] is True


def test_an_outcome_that_was_not_expected_is_exit_status_one(monkeypatch, capfd):
    monkeypatch.setattr(
        race, "run_all", lambda *_: report(finding(), finding("traced-call", "hung"), guard=True)
    )
    assert main(["--guard", "on", "--device", "cpu"]) == 1
    assert "THE GUARD FAILS in traced-call" in capfd.readouterr().out


def test_a_scenario_past_its_deadline_is_ended_and_reported(capfd):
    # Too short for torch to be imported: neither the scenario nor its watchdog has begun, and the process is killed.
    told = race.run_scenario("traced-call", False, "cpu", 2, 0.01 - race.KILL_AFTER_S, ("passed",))
    assert told.outcome == "hung"
    assert not told.as_expected


STUBBORN = """#!/bin/sh
trap '' HUP INT TERM
sleep 60 &
echo $$ $! >"$PIDS.part" && mv "$PIDS.part" "$PIDS"
wait
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, -signal.SIGHUP)])
def test_an_interruption_ends_the_scenario_and_what_it_started_and_is_said_in_a_line(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    stubborn, pids, temporary = tmp_path / "stubborn", tmp_path / "pids", tmp_path / "temporary"
    stubborn.write_text(STUBBORN)
    stubborn.chmod(0o755)
    temporary.mkdir()
    program = (
        "import sys; from payload.compile import race; sys.executable = sys.argv[1]; "
        "sys.exit(race.main(['--device', 'cpu', '--only', 'cold-threads']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(stubborn)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PIDS": str(pids), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    running: list[int] = []
    try:
        deadline = time.monotonic() + 60
        while not pids.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        running = [int(pid) for pid in pids.read_text().split()]
        process.send_signal(number)
        shown, said = process.communicate(timeout=20)
        while left := [pid for pid in running if _runs(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
    finally:
        process.kill()
        for pid in filter(_runs, running):
            os.kill(pid, signal.SIGKILL)
    assert (process.returncode, shown) == (status, ""), said
    announced = f"  cold-threads: {WHAT['cold-threads']} ...\n"
    line = "\ninterrupted. Nothing of the scenario that ran goes on.\n" if number == signal.SIGINT else ""
    assert said == announced + line
    assert not list(temporary.glob("race-*"))


def _runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    "arguments", [["--threads", "1"], ["--deadline", "0"], ["--only", "x"], ["--guard", "maybe"]]
)
def test_bad_usage_is_exit_status_two(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("guard", ["off", "on"])
def test_all_scenarios_end_as_expected(guard):
    """The command as a person types it: compiles drafters in three threads, from a cold cache."""
    ended = subprocess.run(
        [sys.executable, "-m", "payload.compile.race", "--guard", guard, "--device", "cpu"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        timeout=880,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()
