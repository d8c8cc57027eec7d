"""The whole story once with the real torch: wheels sent from the desk, compiled in the container, trained as a unit."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from orchestrator.localnode.desk_pip import TORCH_VERSION, desk_index, desk_torch
from tests.lxc import rootfs
from tests.lxc.bed import PRIVILEGED, Bed
from tests.lxc.desk import Desk
from tests.lxc.lxc import Lxc

# Enough to write a checkpoint and an evaluation; what a drafter learns is shown elsewhere.
SHORT = {
    "data.train_rows": 96,
    "data.regenerate": "false",
    "train.steps": 20,
    "train.log_every": 5,
    "train.checkpoint_every": 10,
    "train.eval_every": 20,
    "train.assert_improves": "false",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deploy_venv_warmup_train_and_fetch_with_the_real_torch(
    bed: Bed, lxc: Lxc, home: Path, tmp_path: Path
) -> None:
    environment = dict(os.environ)
    torch = desk_torch(environment, version=TORCH_VERSION, python="/usr/bin/python3")
    settings = {
        "root": "/opt/real",
        "torch": {"version": torch.version, "backend": torch.backend},
        "index": asdict(desk_index(environment)),
    }
    inventory = bed.write_inventory(tmp_path / "inventory.yaml", container=settings)
    # What pip reads, and a cache of wheels that outlives the test.
    kept = {name: value for name, value in environment.items() if name.startswith("PIP_")}
    desk = Desk(home, inventory, PRIVILEGED, {**kept, "XDG_CACHE_HOME": str(rootfs.cache_folder() / "desk")})
    overrides = [word for key, value in SHORT.items() for word in ("--set", f"{key}={value}")]
    done = desk.run("train", "--wheelhouse", *overrides, timeout_s=800)
    assert done.status == 0, done.text[-3_000:]
    [run] = desk.status()["runs"]
    assert run["state"] == "finished"
    assert f"dflash-{run['run_id']}.service" in lxc.run(["journalctl", "--no-pager"]).stdout
    assert "built" not in desk.ok("warmup", *overrides, timeout_s=300).text, "what is warm stays so"
    desk.ok("fetch", run["run_id"], "--to", str(tmp_path / "runs"))
    fetched = tmp_path / "runs" / run["run_id"]
    rows = [json.loads(line) for line in (fetched / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("step", 0) for row in rows) == SHORT["train.steps"]
    assert list(fetched.glob("checkpoints/*/manifest.json"))
