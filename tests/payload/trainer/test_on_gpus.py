"""On two GPUs, over NCCL: every split of the roles learns what one GPU learns, with and without evaluation between."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.made_up import JobResult, run_job, write_rows, write_target
from payload.recipe import recipe_from_dict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(400),
]


@dataclass
class Workbench:
    """A target and rows that are made up once, and one compile cache for all jobs on them."""

    root: Path
    jobs: dict[str, JobResult] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def train(self, targets: list[int], drafters: list[int], **options: Any) -> JobResult:
        """The job of this topology; options are the recipe's, as ``train__steps`` or ``compile``."""
        name = f"{targets}-{drafters}-{sorted(options.items())}"
        if name not in self.jobs:
            self.jobs[name] = self._run(f"job-{next(self.numbers)}", targets, drafters, options)
        return self.jobs[name]

    def _run(self, name: str, targets: list[int], drafters: list[int], options: dict[str, Any]) -> JobResult:
        rows = str(self.root / "train.jsonl")
        plain: dict[str, Any] = {
            "name": name,
            "target": {"model": str(self.root / "target"), "dtype": "float32", "random_weights": True},
            "drafter": {"num_layers": 2, "mask_token_id": 3},
            "data": {"train": [rows], "max_length": 256, "eval_rows": 3},
            "optim": {"lr": 1e-2},
            "train": {"steps": 6, "batch_size": 2, "num_anchors": 8, "log_every": 1, "checkpoint_every": 3},
            "topology": {"targets": targets, "drafters": drafters},
            "compile": options.get("compile", "off"),
        }
        if "eval_every" in options:
            plain["data"]["eval"] = [rows]
        plain["train"].update({key: value for key, value in options.items() if key != "compile"})
        plain["train"]["eval_max_new_tokens"] = 8
        cache = {
            "TORCHINDUCTOR_CACHE_DIR": str(self.root / "inductor"),
            "TRITON_CACHE_DIR": str(self.root / "triton"),
        }
        return run_job(self.root, recipe_from_dict(plain), name, None, cache, timeout_s=200)


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    root = tmp_path_factory.mktemp("made-up")
    write_target(root / "target", "tiny")
    write_rows(root / "train.jsonl", rows=64, tokens=60)
    return Workbench(root)


def losses(job: JobResult) -> list[float]:
    return [line["loss"] for line in job.lines("train")]


@pytest.mark.parametrize(
    ("targets", "drafters", "options"),
    [
        pytest.param([0], [1], {}, id="1+1"),
        pytest.param([0, 1], [0, 1], {}, id="both roles on both"),
        pytest.param([0], [1], {"prefetch": 1, "accumulation": 2, "eval_every": 2}, id="1+1, evaluating"),
        pytest.param([0, 1], [1], {"eval_every": 2}, id="two targets, the second drafts too"),
        pytest.param([0], [0, 1], {"eval_every": 3}, id="one target, which drafts too"),
        pytest.param([0, 1], [0, 1], {"shard": "fsdp2", "eval_every": 3}, id="both roles, sharded"),
        pytest.param([0, 1], [0, 1], {"compile": "auto"}, id="both roles on both, compiled"),
        pytest.param([0], [1], {"compile": "auto"}, id="1+1, compiled"),
        pytest.param(
            [0, 1], [0, 1], {"compile": "auto", "shard": "fsdp2"}, id="both roles, sharded, compiled"
        ),
    ],
)
def test_a_split_over_two_gpus_learns_what_one_gpu_learns(
    workbench: Workbench, targets: list[int], drafters: list[int], options: dict[str, Any]
) -> None:
    split = workbench.train(targets, drafters, **options)
    alone = workbench.train([0], [0], accumulation=options.get("accumulation", 1) * len(drafters))
    assert losses(split) == pytest.approx(losses(alone), rel=1e-2)
    assert split.lines("first_step")[0]["recompiles"] == 0
    if "eval_every" in options:
        steps = range(0, 7, options["eval_every"])
        assert [line["step"] for line in split.lines("eval")] == list(steps)
