"""Whole jobs on a handful of CPU processes, with a target so small that it needs no training."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from payload.demo import corpus, tokenizer
from payload.recipe import Recipe, recipe_from_dict

# As the trainer's entry does: threads that spin take the cores that other ranks need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The server has torch and transformers imported already, so that a rank starts in a fraction of a second.
context = multiprocessing.get_context("forkserver")
Rank = Callable[[int, int, int, Path], None]
"""What a process does, given its rank, the world size, the port and the run's folder."""

context.set_forkserver_preload(["payload.trainer.job", "transformers.models.qwen3.modeling_qwen3"])


def save_tiny_target(folder: Path) -> Path:
    """A random Qwen3 of 5 layers and hidden size 32, with the demo's tokenizer."""
    words = tiny_tokenizer()
    tiny_causal_lm("qwen3", len(words)).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def tiny_tokenizer() -> Any:
    """The demo's tokenizer, trained on a few rows."""
    return tokenizer.train_tokenizer(
        turn["content"] for row in corpus.rows("train", 300) for turn in row["messages"]
    )


def tiny_causal_lm(family: str, vocabulary: int, tied: bool = True, seed: int = 0) -> Any:
    """A random transformers model of 5 layers and hidden size 32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def tiny_recipe(target: Path, **overrides: Any) -> Recipe:
    """A recipe whose step takes milliseconds; overrides as ``train__steps=4``."""
    plain: dict[str, Any] = {
        "name": "tiny",
        "compile": "off",
        "target": {"model": str(target), "dtype": "float32"},
        "drafter": {"num_layers": 2, "block_size": 4},
        "data": {"train": ["demo"], "train_rows": 64, "max_length": 128},
        "optim": {"lr": 1e-2},
        "train": {
            "steps": 6,
            "batch_size": 2,
            "num_anchors": 8,
            "log_every": 1,
            "checkpoint_every": 1000,
            "eval_every": 1000,
            "eval_max_new_tokens": 8,
        },
    }
    for key, value in overrides.items():
        section, _, name = key.partition("__")
        if name:
            plain.setdefault(section, {})[name] = value
        else:
            plain[section] = value
    return recipe_from_dict(plain)


class Job:
    """The ranks of one run. ``statuses`` are their exit statuses once they have ended."""

    def __init__(self, run_dir: Path, recipe: Recipe, processes: list[BaseProcess]) -> None:
        self.run_dir = run_dir
        self.recipe = recipe
        self.processes = processes

    def wait(self, timeout_s: float = 60) -> list[int | None]:
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def wait_for_step(self, step: int, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(line["step"] >= step for line in self.lines("train")):
            assert time.monotonic() < deadline, self.output()
            assert all(process.exitcode is None for process in self.processes), self.output()
            time.sleep(0.02)

    def kill(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)

    def lines(self, event: str) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        complete = path.read_text().split("\n")[:-1] if path.exists() else []
        return [line for line in map(json.loads, complete) if line["event"] == event]

    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.lines("train")}

    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.run_dir.glob("rank-*.log")))


@contextmanager
def started(run_dir: Path, recipe: Recipe, rank: Rank | None = None, **spec: Any) -> Iterator[Job]:
    """Start every rank of the recipe's topology, each as ``rank``; whatever still lives at the end is killed."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "spec.json").write_text(json.dumps({"recipe": recipe.to_dict(), **spec}))
    world_size = recipe.topology.world_size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=rank or rank_of_a_job, args=(number, world_size, port, run_dir))
        for number in range(world_size)
    ]
    for process in processes:
        process.start()
    job = Job(run_dir, recipe, list(processes))
    try:
        yield job
    finally:
        job.kill(signal.SIGKILL)
        job.wait(10)


def run(run_dir: Path, recipe: Recipe, timeout_s: float = 60, **spec: Any) -> Job:
    """Run a job to its end; every rank must end in time, and with the same status as the others."""
    with started(run_dir, recipe, **spec) as job:
        statuses = job.wait(timeout_s)
        assert None not in statuses, f"still running: {statuses}\n{job.output()}"
        return job


def rank_of_a_job(rank: int, world_size: int, port: int, run_dir: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    log = os.open(run_dir / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from payload.trainer.job import run_job

    status = run_job(run_dir / "spec.json")
    sys.stdout.flush()
    os._exit(status)
