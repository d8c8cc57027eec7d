"""A whole job in one topology: samples a second, and what each rank's GPU did with its time.

    python -m benchmarks.topology --targets 0 --drafters 1 [--shape qwen3-8b|tiny] [--document TOKENS]
        [--cache FOLDER] [--json]

Runs the trainer under torchrun, one process a rank, on random weights of the target's real shapes and rows of random
tokens, for ``--steps`` steps without evaluation. Figures are of the steps after the first two logged intervals. A
sample is a document of ``--document`` tokens; rows are packed with them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.made_up import JobResult, Shape, run_job, write_rows, write_target
from payload.compile.cache import CacheDir
from payload.recipe import Recipe, recipe_from_dict
from payload.trainer.program import drafter_config_for, supply_shape
from payload.trainer.summary import FILE as RANKS_FILE

_SIZES: dict[Shape, dict[str, Any]] = {
    "qwen3-8b": {"batch_size": 4, "num_anchors": 512, "length": 3072, "document": 550, "layers": 5},
    "tiny": {"batch_size": 2, "num_anchors": 8, "length": 256, "document": 50, "layers": 2},
}
_LOG_EVERY = 5


@dataclass(frozen=True)
class RankShare:
    """What a rank does in a step. ``busy_share``: of a target, the share of its time that it computes features; of a
    drafter, that it does not wait for them."""

    rank: int
    role: str
    features_ms: float | None
    busy_share: float
    memory_bytes: int


@dataclass(frozen=True)
class Result:
    """``transfer_share``: of the lead drafter's time, that it waited for features. Bytes are of one micro-batch."""

    targets: tuple[int, ...]
    drafters: tuple[int, ...]
    step_ms: float
    samples_per_s: float
    tokens_per_s: float
    transfer_share: float
    message_bytes: int
    first_step_s: float
    recompiles: int
    ranks: tuple[RankShare, ...]


def recipe_of(
    shape: Shape,
    root: Path,
    targets: Sequence[int],
    drafters: Sequence[int],
    steps: int,
    document: int,
    shard: str,
) -> Recipe:
    """The job's recipe, on rows of random tokens below ``root``, one document each."""
    sizes = _SIZES[shape]
    micro_batches = len(drafters) * 4
    documents = micro_batches * sizes["batch_size"] * (sizes["length"] // document)
    rows = write_rows(root / "data" / "train.jsonl", rows=documents, tokens=document)
    return recipe_from_dict(
        {
            "name": f"topology-{shape}",
            "target": {"model": str(write_target(root / "target", shape)), "random_weights": True},
            "drafter": {"num_layers": sizes["layers"], "mask_token_id": 3},
            "data": {"train": [str(rows)], "max_length": sizes["length"]},
            "train": {
                "steps": steps,
                "batch_size": sizes["batch_size"],
                "num_anchors": sizes["num_anchors"],
                "log_every": _LOG_EVERY,
                "checkpoint_every": 10 * steps,
                "shard": shard,
            },
            "topology": {"targets": list(targets), "drafters": list(drafters)},
            "compile": "auto" if shape == "qwen3-8b" else "off",
        }
    )


def measure(
    recipe: Recipe, root: Path, document: int, environment: Mapping[str, str] | None = None
) -> Result:
    """Run the job and read its figures. Raises RuntimeError with the end of its log when it fails."""
    job = run_job(root, recipe, "topology", None, environment)
    ranks = json.loads((root / "runs" / "topology" / RANKS_FILE).read_text("utf-8"))
    return result_of(recipe, job, ranks, document)


def result_of(recipe: Recipe, job: JobResult, ranks: Sequence[Mapping[str, Any]], document: int) -> Result:
    """The figures of a job from its metrics and from what its ranks said."""
    train, topology = recipe.train, recipe.topology
    lines = job.lines("train")
    # The first line is of the first step alone, and in the second interval the chip is still settling.
    settled = [line for line in lines[2:] if line["step"] % _LOG_EVERY == 0]
    step_s = statistics.median(line["step_s"] for line in settled)
    waited = settled[-1]["transfer_wait_s"] - lines[1]["transfer_wait_s"]
    waiting = waited / (settled[-1]["step"] - lines[1]["step"]) / step_s
    rows = train.batch_size * train.accumulation * len(topology.drafters)
    produced_a_step = len(topology.drafters) * train.accumulation / len(topology.targets)
    shares = []
    for one in ranks:
        role = " and ".join(role for role in ("target", "drafter") if one[role])
        features_s = one["features_s"]
        busy = 1 - waiting if one["drafter"] else (features_s or 0.0) * produced_a_step / step_s
        shares.append(
            RankShare(
                rank=one["rank"],
                role=role,
                features_ms=None if features_s is None else 1000 * features_s,
                busy_share=busy,
                memory_bytes=one["memory_bytes"],
            )
        )
    first = job.lines("first_step")[0]
    tokens = rows * recipe.data.max_length
    return Result(
        targets=topology.targets,
        drafters=topology.drafters,
        step_ms=1000 * step_s,
        samples_per_s=rows * (recipe.data.max_length // document) / step_s,
        tokens_per_s=tokens / step_s,
        transfer_share=waiting,
        message_bytes=message_bytes(recipe),
        first_step_s=first["seconds"],
        recompiles=first["recompiles"],
        ranks=tuple(shares),
    )


def message_bytes(recipe: Recipe) -> int:
    """What travels for one micro-batch, between ranks of one role each."""
    from transformers import AutoConfig

    target = AutoConfig.from_pretrained(recipe.target.model)
    return supply_shape(recipe, drafter_config_for(recipe, target, None), target.dtype).message_bytes


def describe(result: Result, shape: str, document: int) -> str:
    """The figures as lines for a person."""
    lines = [
        f"targets {list(result.targets)}, drafters {list(result.drafters)}, {shape} shapes: {result.step_ms:.1f} ms a "
        f"step, {result.samples_per_s:.2f} samples/s of {document} tokens, {result.tokens_per_s / 1e3:.1f} Ktok/s",
        f"  first step {result.first_step_s:.1f} s, {result.recompiles} recompiles; waiting for features "
        f"{result.transfer_share:.1%} of the lead drafter's time; {result.message_bytes / 1e6:.1f} MB a micro-batch",
    ]
    for one in result.ranks:
        features = "" if one.features_ms is None else f", {one.features_ms:.1f} ms of features a micro-batch"
        memory = f", {one.memory_bytes / 2**30:.1f} GiB" if one.memory_bytes else ""
        lines.append(f"  rank {one.rank} ({one.role}): busy {one.busy_share:.0%}{features}{memory}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--targets", type=int, nargs="+", default=[0])
    parser.add_argument("--drafters", type=int, nargs="+", default=[1])
    parser.add_argument("--shape", choices=list(_SIZES), help="qwen3-8b on GPUs, else tiny")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--document", type=int, help="tokens of a sample; 550, or 50 of the tiny shape")
    parser.add_argument("--shard", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--cache", type=Path, help="keep compiled code here, where a second call finds it")
    parser.add_argument("--cpu", action="store_true", help="hide the GPUs")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available() and not given.cpu
    shape: Shape = given.shape or ("qwen3-8b" if on_gpu else "tiny")
    document = given.document or _SIZES[shape]["document"]
    environment = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    if given.cache is not None:
        environment |= CacheDir(given.cache.resolve()).environment()
    with tempfile.TemporaryDirectory(prefix="topology-", dir=os.environ.get("TMPDIR")) as folder:
        root = Path(folder)
        recipe = recipe_of(shape, root, given.targets, given.drafters, given.steps, document, given.shard)
        result = measure(recipe, root, document, environment)
    plain = json.dumps({"shape": shape, "document": document, **asdict(result)}, indent=1)
    sys.stdout.write((plain if given.json else describe(result, shape, document)) + "\n")


if __name__ == "__main__":
    main()
