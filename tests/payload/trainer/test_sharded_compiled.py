"""Drafters that are sharded and compiled at once, on two CPU processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.made_up import run_job, write_rows, write_target
from payload.compile.policy import decide
from payload.recipe import recipe_from_dict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.skipif(not decide("auto", "cpu").compiled, reason="needs a C++ compiler")
def test_a_compiled_sharded_drafter_learns_what_a_plain_whole_one_learns(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "tiny")
    rows = write_rows(tmp_path / "train.jsonl", rows=32, tokens=60)

    def losses(name: str, **options: str) -> list[float]:
        recipe = recipe_from_dict(
            {
                "name": name,
                "target": {"model": str(target), "dtype": "float32", "random_weights": True},
                "drafter": {"num_layers": 1, "mask_token_id": 3},
                "data": {"train": [str(rows)], "max_length": 128},
                "train": {
                    "steps": 3, "batch_size": 2, "num_anchors": 4, "log_every": 1, "shard": options["shard"],
                },
                "topology": {"targets": [0], "drafters": [0, 1]},
                "compile": options["compile"],
            }
        )  # fmt: skip
        job = run_job(tmp_path, recipe, name, None, {"CUDA_VISIBLE_DEVICES": ""}, timeout_s=400)
        assert job.lines("first_step")[0]["recompiles"] == 0
        assert (job.lines("first_step")[0]["misses"] > 0) == (options["compile"] == "on")
        return [line["loss"] for line in job.lines("train")]

    plain = losses("plain", shard="ddp", compile="off")
    assert losses("compiled", shard="fsdp2", compile="on") == pytest.approx(plain, rel=1e-4)
