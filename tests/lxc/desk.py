"""The desk: the real command line, in a process and a home of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lxc.bed import HOST

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Done:
    """How a command ended. ``stderr`` holds its steps and errors, ``stdout`` what was asked for."""

    status: int
    stdout: bytes
    stderr: str
    seconds: float

    @property
    def text(self) -> str:
        """Everything that a person sees."""
        return self.stdout.decode("utf-8", "replace") + self.stderr


@dataclass(frozen=True)
class Desk:
    """One person's desk, at one inventory and one container."""

    home: Path
    inventory: Path
    container_id: str
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, verb: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> Done:
        """Run ``orchestrator VERB`` to its end."""
        began = time.monotonic()
        process = self.open(verb, *arguments)
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return Done(process.returncode, stdout, stderr.decode("utf-8", "replace"), time.monotonic() - began)

    def ok(self, verb: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> Done:
        """Run it, and take only success for an answer."""
        done = self.run(verb, *arguments, timeout_s=timeout_s)
        assert done.status == 0, f"{verb} ended with {done.status}:\n{done.text}"
        return done

    def open(self, verb: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start it without waiting, as the leader of a process group."""
        words = ["--host", HOST, "--ct", self.container_id, "--inventory", str(self.inventory)]
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator.cli", verb, *words, *arguments],
            cwd=REPOSITORY,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.home),
                "LANG": "C.UTF-8",
                "COLUMNS": "200",
                "PYTHONDONTWRITEBYTECODE": "1",
                **self.environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def status(self, run_id: str | None = None) -> dict[str, Any]:
        """What ``status --json`` says."""
        found: dict[str, Any] = json.loads(self.ok("status", "--json", *([run_id] if run_id else [])).stdout)
        return found
