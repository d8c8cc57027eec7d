"""What the container says of itself: robust against a driver that hangs, and nothing needed is ever pruned."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from payload.agent import locks
from payload.agent.layout import Layout
from payload.agent.processes import identify
from payload.errors import PayloadError
from tests.payload.agent.container import FakeContainer, is_running, until, wait_until_written

GPU_ROW = "0, NVIDIA RTX 6000, GPU-1, 570.86.15, 49140, 1024, 37, 55, [N/A]"


def put_nvidia_smi(container: FakeContainer, folder: Path, script: str) -> None:
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    container.environment = {**container.environment, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_container_without_gpus_has_facts(container: FakeContainer) -> None:
    facts = container.result("facts")
    assert facts["cores"] >= 1
    assert facts["memory"]["total_bytes"] > 1 << 28
    assert facts["disk"]["free_bytes"] > 0
    assert facts["python"]["version"].startswith("3.")
    assert facts["gpus"] == []


def test_gpus_are_told_as_nvidia_smi_tells_them(container: FakeContainer, tmp_path: Path) -> None:
    put_nvidia_smi(
        container, tmp_path / "bin", f'case "$1" in *compute*) echo 4711;; *) echo "{GPU_ROW}";; esac'
    )
    (gpu,) = container.result("status")["gpus"]
    assert gpu == {
        "index": 0,
        "name": "NVIDIA RTX 6000",
        "uuid": "GPU-1",
        "driver": "570.86.15",
        "memory_total_mib": 49140.0,
        "memory_used_mib": 1024.0,
        "utilization_percent": 37.0,
        "temperature_c": 55.0,
        "power_w": None,
    }
    assert container.result("facts")["gpu_holders"] == [4711]


@pytest.mark.slow
def test_a_driver_that_hangs_does_not_hang_the_agent(container: FakeContainer, tmp_path: Path) -> None:
    put_nvidia_smi(container, tmp_path / "bin", "exec sleep 600")
    began = time.monotonic()
    assert container.result("facts")["gpus"] is None
    assert time.monotonic() - began < 9


def test_stop_waits_until_the_gpus_are_released(container: FakeContainer, tmp_path: Path) -> None:
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    container.start("r1", code, str(tmp_path / "pid"))
    pid = wait_until_written(tmp_path / "pid")
    put_nvidia_smi(container, tmp_path / "bin", f"[ -e {tmp_path}/released ] || echo {pid}")
    asked = container.open("stop", run_id="r1", grace_s=0)
    for _ in until():
        if not is_running(int(pid)):
            break
    time.sleep(0.5)
    assert asked.poll() is None
    (tmp_path / "released").touch()
    assert b'"stopped"' in asked.communicate(timeout=30)[0]


def test_a_status_of_an_empty_container_is_empty(container: FakeContainer) -> None:
    shutil.rmtree(container.root / "venvs")
    found = container.result("status")
    assert found["runs"] == []
    assert found["release"] == container.release
    assert found["venv"] is None


def test_a_run_that_cannot_be_read_does_not_hide_the_others(container: FakeContainer) -> None:
    container.start("r1", "")
    container.wait_for_state("r1", "finished")
    (container.root / "runs/broken").mkdir()
    (container.root / "runs/broken/state.json").write_text('{"state": ')
    runs = {run["run_id"]: run for run in container.result("status")["runs"]}
    assert runs["r1"]["state"] == "finished"
    assert "damaged" in runs["broken"]["reason"]


def test_caches_are_listed_with_their_size(container: FakeContainer) -> None:
    folder = container.root / "cache/abc/inductor"
    folder.mkdir(parents=True)
    (folder / "kernel").write_bytes(bytes(5000))
    assert container.result("status")["caches"] == [{"name": "abc", "bytes": 5000}]


def test_the_runs_alone_cost_neither_the_driver_nor_a_count_of_caches(
    container: FakeContainer, tmp_path: Path
) -> None:
    container.start("r1", "")
    whole = container.wait_for_state("r1", "finished")
    put_nvidia_smi(container, tmp_path / "bin", f"touch {tmp_path}/asked")
    assert container.result("status", run_id="r1", runs_only=True) == {"runs": [whole]}
    assert container.result("status", runs_only=True) == {"runs": [whole]}
    assert not (tmp_path / "asked").exists()
    container.result("status")
    assert (tmp_path / "asked").exists()


def test_the_metrics_of_runs_that_are_long_over_are_read_for_their_last_lines_alone(
    container: FakeContainer,
) -> None:
    program = """if True:
        import json
        with open("metrics.jsonl", "w") as file:
            for step in range(1000):
                seldom = {"accepted_length": 2.5, "loss_at_first": 7.0} if step == 500 else {}
                file.write(json.dumps({"step": step, "loss": 1.5, **seldom}) + "\\n")
    """
    container.start("r1", program)
    container.wait_for_state("r1", "finished")
    runs = container.root / "runs"
    state = container.state_file("r1")
    for number in range(2, 13):
        shutil.copytree(runs / "r1", runs / f"r{number}")
        copied = {**state, "run_id": f"r{number}", "created_at": state["created_at"] + number}
        (runs / f"r{number}" / "state.json").write_text(json.dumps(copied))
    newest = {"step": 999, "loss": 1.5, "accepted_length": 2.5, "loss_at_first": 7.0}
    told = [run["last_metrics"] for run in container.result("status")["runs"]]
    assert told == [newest] * 10 + [{"step": 999, "loss": 1.5}] * 2
    # One that is asked for by name is worth the time.
    assert container.result("status", run_id="r1")["runs"][0]["last_metrics"] == newest
    # And so is one that is going on.
    supervisor = subprocess.Popen(["sleep", "600"])
    identity = asdict(identify(supervisor.pid) or pytest.fail("it did not start"))
    (runs / "r1" / "state.json").write_text(json.dumps({**state, "state": "running", "supervisor": identity}))
    assert container.result("status")["runs"][-1]["last_metrics"] == newest
    supervisor.kill()
    supervisor.wait()


def test_only_complete_things_are_offered_for_fetching(container: FakeContainer) -> None:
    code = "print('some output'); open('metrics.jsonl', 'w').write('{}\\n')"
    container.start("r1", code)
    container.wait_for_state("r1", "finished")
    checkpoints = container.root / "runs/r1/checkpoints"
    for name, manifest in (("step-1", True), ("step-2", False), (".step-3.tmp", True)):
        (checkpoints / name).mkdir()
        (checkpoints / name / "model.safetensors").write_bytes(name.encode())
        if manifest:
            (checkpoints / name / "manifest.json").write_text("{}")
    (checkpoints / "step-1" / "link").symlink_to("/etc/passwd")
    (checkpoints / "step-4").mkdir()
    (checkpoints / "step-4" / "manifest.json").symlink_to("/etc/passwd")
    files = {file["path"]: file for file in container.result("files", run_id="r1")["files"]}
    assert sorted(files) == [
        "checkpoints/step-1/manifest.json",
        "checkpoints/step-1/model.safetensors",
        "metrics.jsonl",
        "output.log",
        "spec.json",
        "state.json",
    ]
    for path, file in files.items():
        data = (container.root / "runs/r1" / path).read_bytes()
        assert file["size"] == len(data)
        assert file["sha256"] == hashlib.sha256(data).hexdigest()


def test_the_newest_checkpoint_is_offered_first_and_its_manifest_last(container: FakeContainer) -> None:
    container.start("r1", "")
    container.wait_for_state("r1", "finished")
    checkpoints = container.root / "runs/r1/checkpoints"
    for age, name in enumerate(["step-1000000", "step-999999", "step-999998"]):
        (checkpoints / name / "drafter").mkdir(parents=True)
        for file in ("a.json", "z.safetensors", "drafter/manifest.json", "manifest.json"):
            (checkpoints / name / file).write_text("{}")
        os.utime(checkpoints / name / "manifest.json", (1_000_000 - age, 1_000_000 - age))
    paths = [file["path"] for file in container.result("files", run_id="r1")["files"]]
    assert [path for path in paths if path.startswith("checkpoints/")] == [
        f"checkpoints/{name}/{file}"
        for name in ("step-1000000", "step-999999", "step-999998")
        for file in ("a.json", "drafter/manifest.json", "z.safetensors", "manifest.json")
    ]


def test_a_lock_that_is_held_says_by_whom_and_since_when(container: FakeContainer) -> None:
    layout = Layout.at(str(container.root))
    with locks.hold(layout, "deploy", "receive", "ann@desk"):
        error = container.error("prune", keep=1, holder="bob@desk")
    assert error["kind"] == "busy"
    for said in ("ann@desk", "receive", str(os.getpid()), " s "):
        assert said in error["message"]
    assert container.result("prune", keep=1) == {"removed": []}


def test_a_lock_is_free_when_its_holder_is_dead(container: FakeContainer) -> None:
    layout = Layout.at(str(container.root))
    child = os.fork()
    if child == 0:
        with locks.hold(layout, "deploy", "receive", ""):
            os._exit(1)
    os.waitpid(child, 0)
    with locks.hold(layout, "deploy", "receive", ""):
        pass
    with (
        locks.hold(layout, "deploy", "receive", ""),
        pytest.raises(PayloadError, match="held"),
        locks.hold(layout, "deploy", "receive", ""),
    ):
        pass


@pytest.fixture
def full_disk(container: FakeContainer) -> Iterator[FakeContainer]:
    """The container's runs on a file system of their own, which a job can fill."""
    runs = container.root / "runs"
    runs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(runs)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    yield container
    subprocess.run(["umount", "-l", str(runs)], check=True)


FILL = """
import os, sys, time
try:
    with open("ballast", "wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
except OSError:
    pass
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(float(sys.argv[2]))
"""


def test_the_end_of_a_job_on_a_full_disk_is_told_once_there_is_room(
    full_disk: FakeContainer, tmp_path: Path
) -> None:
    full_disk.start("r1", FILL, str(tmp_path / "pid"), "0.5")
    pid = int(wait_until_written(tmp_path / "pid"))
    for _ in until():
        if not is_running(pid):
            break
    assert full_disk.state("r1")["state"] == "running"
    (full_disk.root / "runs/r1/ballast").unlink()
    assert full_disk.wait_for_state("r1", "finished")["exit_code"] == 0


def test_a_job_on_a_full_disk_can_be_stopped_and_its_end_is_told_once_there_is_room(
    full_disk: FakeContainer, tmp_path: Path
) -> None:
    full_disk.start("r1", FILL, str(tmp_path / "pid"), "600")
    pid = int(wait_until_written(tmp_path / "pid"))
    reply = full_disk.ask("stop", run_id="r1", grace_s=0)
    assert reply.result is not None, reply
    assert any(
        "its end is written as soon as that can be" in str(event.get("message")) for event in reply.events
    )
    assert not is_running(pid)
    (full_disk.root / "runs/r1/ballast").unlink()
    full_disk.wait_for_state("r1", "stopped")
