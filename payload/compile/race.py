"""Shows, on the torch of this venv, what happens when threads trace, compile and train at once.

``python -m payload.compile.race [--guard on|off] [--device cpu|cuda] [--threads N] [--only SCENARIO] [--json]``

Exit status 0 when every scenario ended as expected of this mode and build, 1 when one did not, 2 on bad usage, 130 when
it was interrupted. On stock torch (``--guard off``) some of them are expected to fail: that is the demonstration. Under
the guard all pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from payload.agent.interruption import signals_noted
from payload.compile.fx_flag import FlagHome, inspect_flag
from payload.compile.watchdog import HUNG_EXIT_STATUS

Outcome = Literal["passed", "raised", "diverged", "hung", "died"]

DEADLINE_S = 300.0
# The watchdog inside the process is first; a process that holds the GIL for good is killed this much later.
KILL_AFTER_S = 15.0
_POLL_S = 0.1

WHAT = {
    "traced-call": "a compiled function is called while another thread is inside a trace",
    "traced-module": "a module is called while another thread is inside a trace",
    "cold-threads": "threads with a drafter each compile and train at once, from a cold cache",
    "lazy-backward": "a first backward runs while another thread compiles its forward",
}


@dataclass(frozen=True)
class Finding:
    """How one scenario ended. ``threads`` tells, after a hang, who held what (watchdog.ThreadState as dicts)."""

    scenario: str
    outcome: Outcome
    expected: tuple[Outcome, ...]
    detail: str
    seconds: float
    threads: tuple[dict[str, object], ...] = ()

    @property
    def as_expected(self) -> bool:
        return self.outcome in self.expected


@dataclass(frozen=True)
class Report:
    """All findings on one torch build."""

    torch: str
    git: str
    device: str
    guard: bool
    flag: str
    findings: tuple[Finding, ...]

    @property
    def as_expected(self) -> bool:
        return all(finding.as_expected for finding in self.findings)

    @property
    def verdict(self) -> str:
        """One sentence for a person."""
        failed = [finding for finding in self.findings if finding.outcome != "passed"]
        build = f"torch {self.torch} (git {self.git[:10]}, tracing flag {self.flag}) on {self.device}"
        if self.guard:
            if not failed:
                return f"{build}: the guard holds, all {len(self.findings)} scenarios passed"
            return f"{build}: THE GUARD FAILS in {', '.join(finding.scenario for finding in failed)}"
        if not failed:
            return f"{build} is not affected by any of the {len(self.findings)} scenarios"
        by = "; ".join(f"{finding.scenario} {finding.outcome}" for finding in failed)
        return f"{build} is AFFECTED: {by}"


def expected_outcomes(scenario: str, guard: bool, device: str, home: FlagHome) -> tuple[Outcome, ...]:
    """What may happen: with the guard only ``passed``; on stock torch what follows from where things are kept.

    Where the outcome depends on timing or on the device's autograd threads, every one is accepted and reported.
    """
    if guard:
        return ("passed",)
    if scenario == "traced-call":
        return ("raised",) if home is FlagHome.GLOBAL else ("passed",)
    if scenario == "traced-module":
        # The patches of nn.Module are process-wide in every torch so far.
        return ("raised",)
    if scenario == "lazy-backward":
        # A CPU runs a backward pass in the thread that asked for it, so nobody waits for an autograd thread.
        if device == "cpu":
            return ("passed",)
        # It hung every time on 2.11; builds that keep the flag in the thread have not been seen on a GPU.
        return ("hung",) if home is FlagHome.GLOBAL else ("hung", "passed")
    return ("passed", "raised", "diverged", "hung")


def run_scenario(
    scenario: str, guard: bool, device: str, threads: int, deadline_s: float, expected: tuple[Outcome, ...]
) -> Finding:
    """Run one scenario in its own process, with an empty compile cache, to its end or its deadline.

    A signal to end takes effect when nothing of the scenario is left, neither a process nor a file.
    """
    with signals_noted() as signals, tempfile.TemporaryDirectory(prefix="race-") as folder:
        command = [sys.executable, "-m", "payload.compile.race_scenarios", scenario, "on" if guard else "off"]
        command += [device, str(threads), str(deadline_s), folder]
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "inductor")),
            "TRITON_CACHE_DIR": str(Path(folder, "triton")),
        }
        began = time.monotonic()
        with Path(folder, "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
            status = _wait(process, began + deadline_s + KILL_AFTER_S, signals)
        seconds = time.monotonic() - began
        hung, outcome = Path(folder, "hung.json"), Path(folder, "outcome.json")
        if outcome.exists():
            result = json.loads(outcome.read_text("utf-8"))
            return Finding(scenario, result["outcome"], expected, result["detail"], seconds)
        if status == HUNG_EXIT_STATUS and hung.exists():
            states = tuple(json.loads(hung.read_text("utf-8")))
            return Finding(scenario, "hung", expected, _knot(states), seconds, states)
        if seconds >= deadline_s:
            return Finding(scenario, "hung", expected, "it did not let its own watchdog run", seconds)
        lines = Path(folder, "stderr").read_text("utf-8", "replace").splitlines()
        detail = f"exit status {status}: {lines[-1] if lines else 'it said nothing'}"
        return Finding(scenario, "died", expected, detail, seconds)


def _wait(process: subprocess.Popen[bytes], deadline: float, signals: list[int]) -> int:
    """Its exit status, when it has ended or was ended: at the deadline or by a signal, with all that it started."""
    try:
        while process.poll() is None and not signals and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
    finally:
        # Compilers and compile workers are in its process group, and may outlive it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _knot(states: tuple[dict[str, object], ...]) -> str:
    """Who waits for whom, from the watchdog's states."""
    parts = []
    for state in states:
        holds, waits = state["holds"], state["waits_for"]
        if isinstance(holds, list) and (holds or waits):
            held = f"holds {' and '.join(holds)}" if holds else ""
            waiting = f"waits for {waits}" if waits else ""
            parts.append(f"{state['name']} {' and '.join(part for part in (held, waiting) if part)}")
    return "; ".join(parts) or "no thread holds a lock that is known here"


def run_all(guard: bool, device: str, threads: int, deadline_s: float, only: list[str]) -> Report:
    """Run the scenarios one after the other."""
    import torch
    import torch.fx._symbolic_trace as symbolic_trace

    home = inspect_flag(symbolic_trace).home
    findings = []
    for scenario in only or list(WHAT):
        _say(f"  {scenario}: {WHAT[scenario]} ...")
        expected = expected_outcomes(scenario, guard, device, home)
        finding = run_scenario(scenario, guard, device, threads, deadline_s, expected)
        findings.append(finding)
        _say(_describe(finding))
    return Report(
        torch=torch.__version__,
        git=torch.version.git_version or "",
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        guard=guard,
        flag=home.value,
        findings=tuple(findings),
    )


def _describe(finding: Finding) -> str:
    note = "as expected" if finding.as_expected else f"NOT as expected ({' or '.join(finding.expected)})"
    lines = [f"    {finding.outcome.upper()} after {finding.seconds:.1f} s, {note}: {finding.detail}"]
    for state in finding.threads:
        frames = state["frames"]
        if isinstance(frames, list):
            lines += [f"      [{state['name']}]", *(f"        {frame}" for frame in frames[-6:])]
    return "\n".join(lines)


def _say(line: str) -> None:
    # stdout is for the verdict, or for the JSON.
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m payload.compile.race", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--guard", choices=("on", "off"), default="off")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU when there is one")
    parser.add_argument("--threads", type=int, default=3, metavar="N")
    parser.add_argument("--only", action="append", default=[], choices=list(WHAT))
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE_S, metavar="SECONDS", help="for each scenario"
    )
    parser.add_argument("--json", action="store_true", help="the whole report as JSON on stdout")
    options = parser.parse_args(arguments)
    if options.threads < 2 or options.deadline <= 0:
        parser.error("a race needs at least 2 threads and a deadline above 0")

    try:
        report = _report(parser, options)
    except KeyboardInterrupt:
        _say("\ninterrupted. Nothing of the scenario that ran goes on.")
        return 130
    if options.json:
        findings = [{**asdict(finding), "as_expected": finding.as_expected} for finding in report.findings]
        whole = {
            **asdict(report),
            "findings": findings,
            "verdict": report.verdict,
            "as_expected": report.as_expected,
        }
        sys.stdout.write(json.dumps(whole, indent=1) + "\n")
    else:
        sys.stdout.write(report.verdict + "\n")
    return 0 if report.as_expected else 1


def _report(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Report:
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this torch sees no GPU")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return run_all(options.guard == "on", device, options.threads, options.deadline, options.only)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
