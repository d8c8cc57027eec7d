"""How a job of several processes ends under torchrun: with one clear word, or none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from payload.recipe import Recipe
from payload.trainer import failure
from payload.trainer.failure import EXIT_FAILED, WORD_VARIABLE, EarlyEnd, Failure, tell, told
from tests.payload.trainer.jobs import context, rank_of_a_job, tiny_recipe

SEPARATE = {"topology__targets": [0], "topology__drafters": [1]}


@contextmanager
def launched(run_dir: Path, recipe: Recipe, **spec: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The job as the agent starts it; its output is ``output.log``."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "spec.json").write_text(json.dumps({"recipe": recipe.to_dict(), **spec}))
    with (run_dir / "output.log").open("ab") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "payload.trainer.launch", "--standalone"),
                *("--nproc-per-node", str(recipe.topology.world_size)),
                *("-m", "payload.trainer", "--spec", str(run_dir / "spec.json")),
            ],
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def output(run_dir: Path) -> str:
    return (run_dir / "output.log").read_text()


def await_step(run_dir: Path, process: subprocess.Popen[bytes], step: int) -> None:
    deadline = time.monotonic() + 90
    while f"\nstep {step}/" not in output(run_dir):
        assert process.poll() is None, output(run_dir)
        assert time.monotonic() < deadline, output(run_dir)
        time.sleep(0.05)


def ranks_of(launcher: int) -> list[int]:
    """The ranks' processes, in order."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ranks = {}
    for child in children:
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks.update({int(entry[5:]): int(child) for entry in environment if entry.startswith(b"RANK=")})
    return [ranks[rank] for rank in sorted(ranks)]


def test_an_error_of_one_rank_is_said_once_and_last_and_the_others_leave_quietly(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tiny_target_folder, topology__targets=[0], topology__drafters=[1, 2])
    with launched(tmp_path, recipe, resume_from="../nothing") as process:
        assert process.wait(100) == 1
    said = output(tmp_path)
    assert said.count("error:") == 1, said
    last, hint = said.strip().splitlines()[-2:]
    assert last.startswith("error: rank 1 of 3 (drafter): There is no usable checkpoint in "), said
    assert hint == "  Name a run that has written one, or start a new run."
    ended = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (ended["event"], ended["outcome"]) == ("end", "failed")
    assert ended["verdict"] == last.removeprefix("error: ").strip()
    for noise in ("Traceback", "ChildFailedError", "torch.distributed", "Connection", "[W", "[E"):
        assert noise not in said, said


@pytest.mark.slow
def test_a_run_that_fails_by_its_own_verdict_is_not_called_a_rank_without_a_word(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    asks = {"data__eval": ["demo"], "data__eval_rows": 2, "train__assert_improves": True, "optim__lr": 1e-9}
    with launched(tmp_path, tiny_recipe(tiny_target_folder, **asks)) as process:
        assert process.wait(90) == EXIT_FAILED
    said = output(tmp_path).splitlines()
    assert said[-1].startswith("failed: no clear improvement")
    assert "train.assert_improves" in said[-1]
    ends = [
        line
        for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        if line["event"] == "end"
    ]
    assert [line["verdict"] for line in ends] == [said[-1]]


def test_a_stopped_job_ends_with_its_checkpoint_and_without_a_traceback(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    with launched(tmp_path, tiny_recipe(tiny_target_folder, train__steps=4000, **SEPARATE)) as process:
        await_step(tmp_path, process, 3)
        process.terminate()
        assert process.wait(30) == 143
    said = output(tmp_path)
    assert "the checkpoint of this step resumes the run" in said.strip().splitlines()[-1], said
    for noise in ("Traceback", "error", "SignalException", "[W", "[E"):
        assert noise not in said, said


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_with_the_signal(tiny_target_folder: Path, tmp_path: Path) -> None:
    with launched(tmp_path, tiny_recipe(tiny_target_folder, train__steps=4000, **SEPARATE)) as process:
        await_step(tmp_path, process, 3)
        os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
        assert process.wait(30) == 1
    said = output(tmp_path)
    last = said.strip().splitlines()[-2:]
    assert last[0] == "error: rank 0: its process was ended by SIGKILL.", said
    assert "out of memory" in last[1]
    assert "Traceback" not in said


def impatient_rank(rank: int, world_size: int, port: int, run_dir: Path) -> None:
    """A rank that gives itself a second to leave once another has failed."""
    failure._GRACE_S = 1.0
    rank_of_a_job(rank, world_size, port, run_dir)


def _waits_for_ever(port: int, finished: Path) -> None:
    failure._GRACE_S = 1.0
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    EarlyEnd(dist.PrefixStore("control", store)).watch(let_finish=finished.touch)
    dist.PrefixStore("control", store).get("what nobody sets")


def test_a_rank_that_waits_where_it_cannot_look_is_ended_in_time_but_finishes_what_it_writes(
    tmp_path: Path,
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waiting = context.Process(target=_waits_for_ever, args=(store.port, tmp_path / "finished"))
    waiting.start()
    time.sleep(0.5)
    EarlyEnd(dist.PrefixStore("control", store)).give(EXIT_FAILED)
    waiting.join(30)
    assert waiting.exitcode == EXIT_FAILED
    assert (tmp_path / "finished").exists()


def test_the_first_word_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORD_VARIABLE, str(tmp_path / "word"))
    assert told(tmp_path / "word") is None
    tell(Failure("rank 1 of 2 (drafter)", "No room.", "Free some.\nThen resume."))
    tell(Failure("rank 0 of 2 (target)", "Something else."))
    assert str(told(tmp_path / "word")) == (
        "error: rank 1 of 2 (drafter): No room.\n  Free some.\n  Then resume."
    )
