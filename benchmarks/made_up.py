"""Targets of real shapes without real weights, rows of random tokens, and jobs on them, as the agent would run them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from payload.compile.cache import cache_dir
from payload.demo import corpus, tokenizer
from payload.recipe import Recipe

REPOSITORY = Path(__file__).parents[1]

Shape = Literal["qwen3-8b", "tiny"]

_SHAPES: dict[Shape, dict[str, Any]] = {
    # Qwen/Qwen3-8B's config.json.
    "qwen3-8b": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "tiny": {
        "vocab_size": 4096,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
}


def write_target(folder: Path, shape: Shape) -> Path:
    """A target's folder with config and tokenizer (the demo's) and no weights: for ``target.random_weights``."""
    from transformers import Qwen3Config

    words = tokenizer.train_tokenizer(
        turn["content"] for row in corpus.rows("train", 300) for turn in row["messages"]
    )
    words.save_pretrained(folder)
    Qwen3Config(**_SHAPES[shape], pad_token_id=0, bos_token_id=None, eos_token_id=2).save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: int, tokens: int, seed: int = 0) -> Path:
    """JSONL rows of ``tokens`` random token ids that every target of :func:`write_target` has."""
    generator = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            ids = [generator.randrange(10, 200) for _ in range(tokens)]
            file.write(json.dumps({"input_ids": ids}) + "\n")
    return path


@dataclass(frozen=True)
class JobResult:
    """How a job ended: exit status, its log, and the lines of its metrics."""

    status: int
    output: str
    metrics: list[dict[str, Any]]

    def lines(self, event: str) -> list[dict[str, Any]]:
        """The lines of one event, in order."""
        return [line for line in self.metrics if line["event"] == event]


def run_job(
    root: Path,
    recipe: Recipe,
    run_id: str,
    fingerprint: str | None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 900,
) -> JobResult:
    """Run a recipe under torchrun to its end, with the compile cache ``fingerprint`` of ``root`` or from cold.

    Raises ``RuntimeError`` with the end of the log when it fails.
    """
    run_dir = root / "runs" / run_id
    run_dir.mkdir(parents=True)
    spec = {"run_id": run_id, "recipe": recipe.to_dict(), "cache": fingerprint}
    (run_dir / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    cache = cache_dir(str(root), fingerprint or f"cold-{run_id}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(recipe.topology.world_size), "-m", "payload.trainer"]
    command += ["--spec", str(run_dir / "spec.json"), *(["--cold-ok"] if fingerprint is None else [])]
    inherited = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    with (run_dir / "output.log").open("wb") as log:
        status = subprocess.run(
            command,
            cwd=run_dir,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                **cache.environment(),
                **(environment or {}),
                "PYTHONPATH": inherited,
                "DFLASH_ROOT": str(root),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        ).returncode
    output = (run_dir / "output.log").read_text("utf-8", "replace")
    if status:
        raise RuntimeError(f"the job {run_id} ended with exit status {status}:\n{output[-4000:]}")
    metrics = run_dir / "metrics.jsonl"
    return JobResult(status, output, [json.loads(line) for line in metrics.read_text("utf-8").splitlines()])
