"""The whole story through the real command line: OpenSSH, pct, LXC, and the job as a unit of systemd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.lxc.bed import PRIVILEGED
from tests.lxc.desk import Desk
from tests.lxc.jobs import until
from tests.lxc.lxc import Lxc

TRAINER = """
import json, os, time
from pathlib import Path
for step in range(1, 21):
    print(f"step {step}", flush=True)
    with open("metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "loss": 1 / step}) + "\\n")
    time.sleep(0.05)
folder = Path("checkpoints/step-20")
folder.mkdir()
(folder / "model.safetensors").write_bytes(os.urandom(300_000))
(folder / "manifest.json").write_text("{}")
"""


def test_deploy_venv_train_logs_status_stop_fetch(
    home: Path, inventory: Callable[..., Path], lxc: Lxc, tmp_path: Path
) -> None:
    desk = Desk(home, inventory(root="/opt/story", env={"STANDIN_JOB": TRAINER}), PRIVILEGED)
    assert "sent" in desk.ok("deploy").text
    assert "was there" in desk.ok("deploy").text
    assert "built" in desk.ok("venv").text
    trained = desk.ok("train", "--cold")
    assert trained.stdout.decode().splitlines()[:20] == [f"step {step}" for step in range(1, 21)]
    [run] = desk.status()["runs"]
    assert (run["state"], run["last_metrics"]["step"]) == ("finished", 20)
    run_id = run["run_id"]
    assert desk.ok("logs", run_id).stdout == (lxc.root / f"opt/story/runs/{run_id}/output.log").read_bytes()
    desk.ok("fetch", run_id, "--to", str(tmp_path / "runs"))
    brought = tmp_path / "runs" / run_id / "checkpoints/step-20/model.safetensors"
    assert (
        brought.read_bytes()
        == (lxc.root / f"opt/story/runs/{run_id}/checkpoints/step-20/model.safetensors").read_bytes()
    )


def test_a_job_is_a_unit_of_the_containers_systemd_and_stop_ends_it(
    home: Path, inventory: Callable[..., Path], lxc: Lxc
) -> None:
    job = "import time\nprint('begun', flush=True)\ntime.sleep(600)"
    desk = Desk(home, inventory(root="/opt/story", env={"STANDIN_JOB": job}), PRIVILEGED)
    desk.ok("train", "--cold", "--detach")
    [run] = [run for run in desk.status()["runs"] if run["state"] == "running"]
    unit = f"dflash-{run['run_id']}.service"
    assert lxc.run(["systemctl", "is-active", unit]).stdout.strip() == "active"
    assert f"/system.slice/{unit}" in lxc.run(["cat", f"/proc/{run['pid']}/cgroup"]).stdout
    until(lambda: b"begun" in desk.ok("logs", run["run_id"]).stdout)
    assert "stopped" in desk.ok("stop", run["run_id"], "--grace", "2").text
    assert lxc.run(["systemctl", "is-active", unit], check=False).stdout.strip() == "inactive"
    assert not (lxc.root / f"proc/{run['pid']}").exists()
