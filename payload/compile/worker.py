"""One fresh process that runs one program of the training once and tells what its compilation did.

Started by warmup, which sets the cache's environment variables, as
``python -m payload.compile.worker REQUEST.json REPORT.json``. The report is written last, so that a process that
died leaves none.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from payload.errors import PayloadError

Role = Literal["target", "drafter", "both"]


@dataclass(frozen=True)
class WorkRequest:
    """What to run. ``load`` and ``save`` are paths of torch's cache artifacts, or None. A program that compiles nothing
    saves nothing."""

    recipe: dict[str, Any]
    role: Role
    device: str
    load: str | None = None
    save: str | None = None


@dataclass(frozen=True)
class WorkReport:
    """What happened: the wall time of the first ``run_once``, and the compiler's counters after it."""

    role: Role
    seconds: float
    build_seconds: float
    hits: int
    misses: int
    bypassed: int
    retraced: int
    recompiles: int
    attention: str

    @property
    def graphs(self) -> int:
        """How many graphs the program has; 0 when nothing of it is compiled."""
        return self.hits + self.misses + self.bypassed


def run(request: WorkRequest) -> WorkReport:
    """Build the program as the trainer does, run it once, and save the artifact if asked."""
    import torch

    from payload.compile.counts import read_counts
    from payload.compile.fingerprint import cpu_threads
    from payload.compile.first_step import attention_name
    from payload.compile.guard import install
    from payload.compile.imports import import_compiler
    from payload.recipe import recipe_from_dict
    from payload.trainer.program import build_step

    import_compiler()
    install()
    if request.device == "cpu":
        torch.set_num_threads(cpu_threads(request.recipe))
    if (
        request.load is not None
        and torch.compiler.load_cache_artifacts(Path(request.load).read_bytes()) is None
    ):
        raise PayloadError(f"torch cannot read the cache artifact for the {request.role}", kind="refused")
    began = time.monotonic()
    program = build_step(recipe_from_dict(request.recipe), request.role, torch.device(request.device))
    built = time.monotonic()
    program.run_once()
    if request.device == "cuda":
        torch.cuda.synchronize()
    ended = time.monotonic()
    counts = read_counts()
    if request.save is not None:
        saved = torch.compiler.save_cache_artifacts()
        if saved is not None:
            Path(request.save).write_bytes(saved[0])
    return WorkReport(
        role=request.role,
        seconds=ended - built,
        build_seconds=built - began,
        hits=counts.hits,
        misses=counts.misses,
        bypassed=counts.bypassed,
        retraced=counts.retraced,
        recompiles=counts.recompiles,
        attention=attention_name(request.device),
    )


def main(request_path: str, report_path: str) -> int:
    """Run the request in ``request_path``; write ``{"report": ...}`` or ``{"error": ...}`` to ``report_path``."""
    answer: dict[str, Any]
    try:
        answer = {"report": asdict(run(WorkRequest(**json.loads(Path(request_path).read_text("utf-8")))))}
    except PayloadError as error:
        answer = {"error": {"kind": error.kind, "message": error.message, "hint": error.hint}}
    except Exception as error:  # noqa: BLE001 - the parent must learn what failed, whatever it was
        traceback.print_exc()
        answer = {"error": {"kind": "failed", "message": f"{type(error).__name__}: {error}", "hint": ""}}
    Path(report_path).write_text(json.dumps(answer), encoding="utf-8")
    return 0 if "report" in answer else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
