"""Doctor and the check before `train`, on the embedded node: what is wrong is said with its fix, and refused."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent import Agent
from orchestrator.checks import Finding
from orchestrator.console import Console
from orchestrator.container import Container
from orchestrator.doctor import examine, show_findings
from orchestrator.errors import OrchestratorError, RefusedError, TransportError
from orchestrator.localnode.node import NodeInfo
from orchestrator.settings import TorchPin
from orchestrator.train import prepare
from payload.recipe import load_recipe
from tests.orchestrator.test_cli import orchestrator
from tests.orchestrator.test_job_steps import agent, end, start

__all__ = ["agent"]

QUIET = Console(quiet=True)
TINY = load_recipe("tiny-cpu", {})
PLACE = ("--host", "local", "--ct", "200")


@pytest.fixture
def gpu_container(container: Container) -> Container:
    """The container as an inventory would describe one with eight GPUs, which this machine does not have."""
    pinned = {"gpus": 8, "torch": TorchPin(), "recipe": "qwen3-8b"}
    container.settings = replace(container.settings, **pinned)
    return container


@pytest.fixture
def locked(local_node: NodeInfo) -> Iterator[None]:
    """A backup holds the container."""
    config = local_node.inventory.parent / "containers/200/config"
    before = config.read_text()
    config.write_text(before + "lock: backup\n")
    yield
    config.write_text(before)


def findings_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_doctor_passes_a_container_that_is_fit(local_node: NodeInfo) -> None:
    done = orchestrator("doctor", *PLACE, inventory=local_node.inventory)
    assert done.returncode == 0, done.stderr
    assert "✓ disk" in done.stdout
    assert "asks for none here" in done.stdout


def test_doctor_asks_for_no_gpu_on_a_machine_that_has_none(local_node: NodeInfo) -> None:
    done = orchestrator("doctor", "--json", *PLACE, inventory=local_node.inventory)
    assert json.loads(done.stdout)["worst"] == "ok"
    assert findings_of(done)["gpus"]["severity"] == "ok"


def test_a_locked_container_is_refused_with_exit_status_4(local_node: NodeInfo, locked: None) -> None:
    done = orchestrator("doctor", "--json", *PLACE, inventory=local_node.inventory)
    assert done.returncode == 4
    assert findings_of(done)["lock"]["severity"] == "error"
    assert "pct unlock 200" in findings_of(done)["lock"]["fix"]


def test_a_stopped_container_is_a_finding_with_the_command_that_starts_it(local_node: NodeInfo) -> None:
    subprocess.run([str(local_node.pct), "stop", "200"], check=True, timeout=20)
    try:
        done = orchestrator("doctor", *PLACE, inventory=local_node.inventory)
    finally:
        subprocess.run([str(local_node.pct), "start", "200"], check=True, timeout=20)
    assert done.returncode == 4
    assert "✗ container container 200 on local is stopped" in done.stdout
    assert "fix: Start it on the host: pct start 200" in done.stdout


def test_a_container_that_is_not_there_is_a_transport_error(container: Container) -> None:
    container.destination = replace(container.destination, container_id="999")
    with QUIET.step("doctor") as report, pytest.raises(TransportError, match="no container 999"):
        examine(container, TINY, report)


def test_a_run_on_gpus_is_judged_honestly_where_there_are_none(gpu_container: Container) -> None:
    with QUIET.step("doctor") as report:
        found = {f.check: f for f in examine(gpu_container, load_recipe("qwen3-8b", {}), report).findings}
    assert {name for name, finding in found.items() if finding.severity == "error"} >= {
        "gpus",
        "nodes",
        "driver",
    }
    assert "8 GPUs are needed" in found["gpus"].seen
    assert found["cuda"].seen.startswith("not tried")


def test_train_refuses_an_unfit_container_before_it_builds_a_venv(gpu_container: Container) -> None:
    with pytest.raises(RefusedError, match="not fit for this run: gpus: no nvidia-smi") as refused:
        prepare(gpu_container, load_recipe("qwen3-8b", {}), QUIET)
    assert "ANYWAY=1" in refused.value.hint
    assert "--no-kernel-module" in refused.value.hint
    assert not list(Path(gpu_container.settings.root).glob("venvs/*/pyvenv.cfg"))


def test_train_goes_on_anyway_when_told_to_and_shows_what_was_found(
    container: Container, locked: None, capfd: pytest.CaptureFixture[str]
) -> None:
    # A venv that cannot be built proves that the check before it was passed.
    offline = replace(container.settings.index, offline=True, find_links=())
    nowhere = {"torch": TorchPin(version="0.0.1", backend="cpu"), "index": offline}
    container.settings = replace(container.settings, **nowhere)
    with pytest.raises(RefusedError, match="locked by Proxmox: backup"):
        prepare(container, TINY, QUIET)
    with pytest.raises(OrchestratorError, match=r"0\.0\.1"):
        prepare(container, TINY, Console(), anyway=True)
    assert "error: lock: locked by Proxmox: backup" in capfd.readouterr().err


def test_a_container_that_hangs_is_a_finding_and_no_broken_link(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Container.run

    def frozen(self: Container, argv: Any, **options: Any) -> Any:
        return run(self, ["sleep", "60"] if argv == ["true"] else argv, **options)

    monkeypatch.setattr(Container, "run", frozen)
    monkeypatch.setattr("orchestrator.doctor.ANSWER_S", 0.5)
    with QUIET.step("doctor") as report:
        found = examine(container, TINY, report).findings
    assert [finding.check for finding in found] == ["container", "lock"]
    assert "frozen" in found[0].seen
    assert "pct resume 200" in found[0].fix


def test_what_a_container_says_cannot_look_like_a_line_of_doctors(capsys: pytest.CaptureFixture[str]) -> None:
    forged = "held by process 1 (x\n\x1b[2J✓ gpus      8 needed\r)"
    show_findings(QUIET, [Finding("free", "error", forged, "why", "fix\n✓ fine")])
    assert len(capsys.readouterr().out.splitlines()) == 3


READS = (
    "--set=target.model=./models/none",
    "--set=data.train=[data/none.jsonl]",
    "--set=data.eval=[data/empty.jsonl]",
)


def test_what_the_recipe_reads_is_looked_for_before_anything_is_built(
    local_node: NodeInfo, container: Container
) -> None:
    root = Path(container.settings.root)
    (root / "data").mkdir(parents=True, exist_ok=True)
    (root / "data/empty.jsonl").touch()
    done = orchestrator("doctor", "--json", *READS, *PLACE, inventory=local_node.inventory)
    assert done.returncode == 4
    found = findings_of(done)
    place = f"HOST=local CT=200 INVENTORY={local_node.inventory}"
    assert f"make put FILE=<the model's folder> TO=models/none {place}" in found["target"]["fix"]
    assert f"make put FILE=<rows.jsonl> TO=data/none.jsonl {place}" in found["data"]["fix"]
    assert (
        f"there is no file {root}/data/none.jsonl; {root}/data/empty.jsonl is empty" == found["data"]["seen"]
    )
    train = orchestrator("train", *READS, *PLACE, inventory=local_node.inventory)
    assert train.returncode == 4
    assert f"target: there is no folder {root}/models/none" in train.stderr
    assert "TO=data/none.jsonl" in train.stderr
    assert "venv" not in train.stderr
    words = " ".join(word.removeprefix("--set=") for word in READS)
    assert f"All of it: make doctor 'SET={words}' {place}" in train.stderr
    (root / "models/none").mkdir(parents=True)
    (root / "models/none/config.json").write_text("{}")
    for name in ("none", "empty"):
        (root / f"data/{name}.jsonl").write_text("{}")
    done = orchestrator("doctor", "--json", *READS, *PLACE, inventory=local_node.inventory)
    assert done.returncode == 0, done.stdout


def test_doctor_tells_of_a_run_that_is_going_on_and_calls_it_no_failure(
    local_node: NodeInfo, agent: Agent
) -> None:
    run_id = start(agent, "import time; time.sleep(60)")
    try:
        done = orchestrator("doctor", *PLACE, inventory=local_node.inventory)
    finally:
        end(agent, run_id)
    assert done.returncode == 0, done.stderr
    assert f"! job       run {run_id} is running" in done.stdout
    assert "all well" not in done.stderr
    assert "1 warning (job)" in done.stderr
    after = orchestrator("doctor", *PLACE, inventory=local_node.inventory)
    assert "all well" in after.stderr
