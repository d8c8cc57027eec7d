"""What facts mean for a run.

``recorded/cpu-node.json`` is what an agent answered. ``eight-gpus.json`` is written after it, nvidia-smi's output and
Proxmox's configuration, for a container that no test has; ``faults.json`` holds what differs from that.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.checks import Finding, Needs, Seen, judge, needs_of, worst
from orchestrator.settings import ContainerSettings, TorchPin
from payload.recipe import load_recipe

RECORDED = Path(__file__).parent / "recorded"
FAULTS: dict[str, Any] = json.loads((RECORDED / "faults.json").read_text())
EIGHT_GPUS = ContainerSettings(gpus=8, targets=(0, 1, 2, 3, 4), drafters=(5, 6, 7))
NEEDS = needs_of(EIGHT_GPUS, "200", load_recipe("qwen3-8b", {}))

# Fault -> the check that finds it, how grave it is, a part of what was seen, a part of what to type.
EXPECTED = {
    "missing-uvm": ("nodes", "error", "missing: /dev/nvidia-uvm", "pct set 200 --dev9 /dev/nvidia-uvm"),
    "held-by-another": ("free", "error", "process 4711 (python -m sglang", "pct exec 200 -- kill 4711"),
    "held-by-a-run": (
        "free",
        "error",
        "of run 20261130-101010-abcdef",
        "make stop RUN_ID=20261130-101010-abcdef",
    ),
    "held-from-outside": ("free", "error", "GPU 2 in use (19.5 GiB", "--query-compute-apps"),
    "old-driver": ("driver", "error", "CUDA 12.8 needs 525.60.13", "pin a build for CUDA 11"),
    "no-python-h": (
        "compiler",
        "error",
        "no Python.h",
        "apt-get install -y gcc g++ libc6-dev python3.11-dev",
    ),
    "no-compiler": ("compiler", "error", "no gcc", "apt-get install"),
    "tiny-shm": ("shm", "error", "63 MiB free of 64 MiB", "remount,size=8G /dev/shm"),
    "locked-by-backup": ("lock", "error", "backup", "pct unlock 200"),
    "seven-gpus": ("gpus", "error", "GPU 7 missing; there are 7, 8 are needed", "--dev7 /dev/nvidia7"),
    "no-driver-libraries": ("gpus", "error", "no nvidia-smi", "--no-kernel-module"),
    "nvidia-smi-hangs": ("gpus", "error", "does not answer", "pct exec 200 -- nvidia-smi"),
    "closed-node": ("nodes", "error", "/dev/nvidiactl", "mode=0666"),
    "one-gpu-is-broken": ("cuda", "error", "GPU 3: RuntimeError: CUDA error: uncorrectable ECC", "dmesg"),
    "full-disk": ("disk", "error", "900 MiB free", "pct resize 200 rootfs"),
    "no-inodes": ("disk", "error", "312 more files", "prune"),
    "read-only": ("disk", "error", "cannot be written", "root:"),
    "slow-clock": ("clock", "warning", "95.0 s behind", "timedatectl"),
    "clock-of-another-day": ("clock", "error", "90000.0 s ahead", "timedatectl"),
    "no-nesting": ("init", "warning", "nesting is off", "pct set 200 --features nesting=1"),
    "port-is-held": ("port", "warning", "process 77 (jupyter-lab)", "MASTER_PORT"),
    "no-loopback": ("port", "error", "Cannot assign", "ip link set lo up"),
}


def merge(base: Any, over: Any) -> Any:
    """A JSON merge patch (RFC 7396), except that lists and nulls inside of ``facts`` are values."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {**base, **{key: merge(base.get(key), value) for key, value in over.items()}}


def recorded(name: str, fault: str | None = None) -> Seen:
    found = merge(json.loads((RECORDED / f"{name}.json").read_text()), FAULTS[fault] if fault else {})
    found["config"] = {key: value for key, value in found["config"].items() if value is not None}
    return Seen(**found)


def check(findings: list[Finding], name: str) -> Finding:
    [found] = [finding for finding in findings if finding.check == name]
    return found


def test_a_good_container_of_eight_gpus_passes_every_check() -> None:
    findings = judge(recorded("eight-gpus"), NEEDS)
    assert {finding.severity for finding in findings} == {"ok"}, findings
    names = [
        "lock",
        "clock",
        "disk",
        "shm",
        "compiler",
        "init",
        "port",
        "gpus",
        "nodes",
        "driver",
        "free",
        "cuda",
    ]
    assert [finding.check for finding in findings] == names


def test_every_recorded_fault_is_expected_to_be_found() -> None:
    assert set(FAULTS) == set(EXPECTED)


@pytest.mark.parametrize("fault", EXPECTED)
def test_a_fault_is_found_with_what_to_type(fault: str) -> None:
    name, severity, seen, fix = EXPECTED[fault]
    findings = judge(recorded("eight-gpus", fault), NEEDS)
    finding = check(findings, name)
    assert (finding.severity, seen in finding.seen, fix in finding.fix) == (severity, True, True), finding
    assert finding.why
    others = {other.check for other in findings if other.severity == "error"} - {name}
    assert others <= {"cuda", "nodes"}, "a fault is named once, beside what it breaks"


@pytest.mark.parametrize(
    ("recipe", "container"),
    [
        ("tiny-cpu", ContainerSettings(torch=TorchPin(version="2.13.0", backend="cpu"))),
        ("qwen3-8b", ContainerSettings(torch=TorchPin(version="2.13.0", backend="cpu"))),
        ("tiny-cpu", ContainerSettings()),
        ("tiny-cpu", ContainerSettings(gpus=8, targets=(0,), drafters=(1,))),
        ("tiny-cpu", ContainerSettings(torch=TorchPin(version="2.13.0", backend=None))),
    ],
)
def test_a_run_on_cpus_asks_for_no_gpu(recipe: str, container: ContainerSettings) -> None:
    findings = judge(recorded("cpu-node"), needs_of(container, "200", load_recipe(recipe, {})))
    assert worst(findings) == "ok", findings
    assert not {"nodes", "driver", "free", "cuda"} & {finding.check for finding in findings}


def test_a_run_on_gpus_is_refused_on_a_machine_that_has_none() -> None:
    findings = judge(recorded("cpu-node"), NEEDS)
    assert {finding.check for finding in findings if finding.severity == "error"} >= {
        "gpus",
        "nodes",
        "driver",
    }
    assert check(findings, "cuda").seen == "not tried: there is no venv yet"


def test_a_run_on_cpus_goes_eager_without_a_compiler_unless_it_must_compile() -> None:
    seen = recorded("eight-gpus", "no-compiler")
    cpu = ContainerSettings(torch=TorchPin(version="2.13.0", backend="cpu"))
    for compile_mode, severity in (("auto", "warning"), ("on", "error")):
        needs = needs_of(cpu, "200", load_recipe("tiny-cpu", {"compile": compile_mode}))
        assert check(judge(seen, needs), "compiler").severity == severity


def test_only_the_gpus_of_the_run_need_to_be_free() -> None:
    two = ContainerSettings(gpus=8, targets=(0,), drafters=(1,))
    needs = needs_of(two, "200", load_recipe("qwen3-8b", {"topology.targets": [0], "topology.drafters": [1]}))
    assert needs.gpus == (0, 1)
    assert check(judge(recorded("eight-gpus", "held-by-another"), needs), "free").severity == "ok"
    assert check(judge(recorded("eight-gpus", "held-by-a-run"), needs), "free").severity == "error"


@pytest.mark.parametrize(
    ("backend", "driver", "severity"),
    [
        ("cu128", "525.60.13", "ok"),
        ("cu128", "525.60.12", "error"),
        ("cu130", "570.124.06", "error"),
        ("cu130", "580.65.06", "ok"),
        ("cu118", "450.80.02", "ok"),
        ("cu990", "570.124.06", "ok"),
    ],
)
def test_the_driver_is_held_against_the_cuda_of_the_pin(backend: str, driver: str, severity: str) -> None:
    pinned = replace(EIGHT_GPUS, torch=TorchPin(backend=backend))
    seen = recorded("eight-gpus")
    needs = needs_of(pinned, "200", load_recipe("qwen3-8b", {}))
    findings = judge(Seen({**seen.facts, "driver": driver}, seen.config), needs)
    assert check(findings, "driver").severity == severity


def test_the_port_of_the_inventorys_environment_is_the_one_that_is_tried() -> None:
    port = replace(EIGHT_GPUS, env={"MASTER_PORT": "31000"})
    assert needs_of(port, "200", load_recipe("qwen3-8b", {})).port == 31000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FACT_NAMES = sorted({*recorded("eight-gpus").facts, "runs", "paths"})


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(FACT_NAMES), json_values),
    st.booleans(),
    st.dictionaries(st.sampled_from(["lock", "features", "dev0"]), st.text(max_size=8)) | st.none(),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
    st.none() | st.dictionaries(st.sampled_from(["available", "error", "devices", "cuda"]), json_values),
    st.sampled_from([NEEDS, needs_of(ContainerSettings(), "200", load_recipe("tiny-cpu", {}))]),
)
def test_whatever_a_container_answers_is_judged_and_every_complaint_has_its_fix(
    changes: dict[str, Any],
    on_a_good_one: bool,
    config: dict[str, str] | None,
    ahead_s: float | None,
    cuda: dict[str, Any] | None,
    needs: Needs,
) -> None:
    facts = {**(recorded("eight-gpus").facts if on_a_good_one else {}), **changes}
    for finding in judge(Seen(facts, config, ahead_s, 0.1, cuda), needs):
        assert finding.seen
        assert finding.severity == "ok" or (finding.why and finding.fix)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 7)), st.integers(0, 2**40), st.integers(0, 2**36))
def test_taking_something_away_never_makes_a_container_fitter(gone: set[int], disk: int, shm: int) -> None:
    order = ["ok", "warning", "error"]
    good = recorded("eight-gpus")
    poorer = Seen(
        {
            **good.facts,
            "gpus": [gpu for gpu in good.facts["gpus"] if gpu["index"] not in gone],
            "disk": {"free_bytes": min(disk, good.facts["disk"]["free_bytes"])},
            "shm": {"free_bytes": min(shm, good.facts["shm"]["free_bytes"])},
        },
        good.config,
        good.clock_ahead_s,
        good.clock_uncertainty_s,
        good.cuda,
    )
    poorest = Seen(
        {**poorer.facts, "disk": {"free_bytes": disk // 2}, "shm": {"free_bytes": shm // 2}}, good.config
    )
    for name in ("disk", "shm", "gpus"):
        grave = [order.index(check(judge(seen, NEEDS), name).severity) for seen in (poorer, poorest)]
        assert grave == sorted(grave)
    assert (check(judge(poorer, NEEDS), "gpus").severity == "error") == bool(gone)


HERE = "HOST=lab CT=200"
SMOLLM2 = needs_of(EIGHT_GPUS, "200", load_recipe("smollm2", {}), HERE)
MODEL = "./models/smollm2"
GGUF = f"{MODEL}/SmolLM2-135M-Instruct.Q4_1.gguf"


def with_paths(needs: Needs, **missing: Any) -> Seen:
    """The good container, with every path of the recipe, except as ``missing`` (by check) says."""
    root = f"{needs.root}/"
    paths: dict[str, Any] = {name: {"path": root + name, "kind": "file", "bytes": 9} for name in needs.paths}
    if needs.target:
        paths[needs.target] = {"path": root + needs.target, "kind": "folder", "bytes": None}
    seen = recorded("eight-gpus")
    return Seen({**seen.facts, "paths": {**paths, **missing}}, seen.config, cuda=seen.cuda)


def test_what_a_recipe_reads_is_asked_for_by_the_names_that_it_has() -> None:
    assert SMOLLM2.paths == [MODEL, GGUF, "./data/prompts.jsonl", "./data/held-out.jsonl"]
    assert needs_of(EIGHT_GPUS, "200", load_recipe("tiny-cpu", {})).paths == []
    of_the_hub = {"target.model": "/m", "data.train": ["hub:x", "a.jsonl"], "data.eval": ["a.jsonl", "demo"]}
    assert needs_of(EIGHT_GPUS, "200", load_recipe("tiny-cpu", of_the_hub)).paths == [
        "/m", "/m/config.json", "a.jsonl",
    ]  # fmt: skip


def test_a_target_and_rows_that_are_there_pass() -> None:
    findings = judge(with_paths(SMOLLM2), SMOLLM2)
    assert {finding.severity for finding in findings} == {"ok"}
    assert [finding.check for finding in findings][-2:] == ["target", "data"]


@pytest.mark.parametrize(
    ("name", "found", "check_name", "seen", "fix"),
    [
        (MODEL, {"kind": None}, "target", "there is no folder", f"TO=models/smollm2 {HERE}"),
        (MODEL, {"kind": "file", "bytes": 3}, "target", "there is no folder", "TO=models/smollm2"),
        (GGUF, {"kind": None}, "target", "holds no SmolLM2-135M-Instruct.Q4_1.gguf", "TO=models/smollm2"),
        ("./data/prompts.jsonl", {"kind": None}, "data", "there is no file", f"TO=data/prompts.jsonl {HERE}"),
        ("./data/held-out.jsonl", {"kind": "folder"}, "data", "there is no file", "TO=data/held-out.jsonl"),
        ("./data/held-out.jsonl", {"kind": "other"}, "data", "there is no file", "TO=data/held-out.jsonl"),
        ("./data/held-out.jsonl", {"kind": "file", "bytes": 0}, "data", "is empty", "TO=data/held-out.jsonl"),
    ],
)
def test_what_a_recipe_reads_and_is_not_there_is_an_error_with_the_put_that_brings_it(
    name: str, found: dict[str, Any], check_name: str, seen: str, fix: str
) -> None:
    finding = check(judge(with_paths(SMOLLM2, **{name: found}), SMOLLM2), check_name)
    assert (finding.severity, seen in finding.seen) == ("error", True), finding
    assert "make put FILE=<" in finding.fix
    assert fix in finding.fix


def test_all_rows_that_are_missing_are_named_at_once() -> None:
    gone = {name: {"kind": None} for name in SMOLLM2.rows}
    finding = check(judge(with_paths(SMOLLM2, **gone), SMOLLM2), "data")
    assert finding.seen.count("there is no file") == finding.fix.count("make put") == 2


@pytest.mark.parametrize("name", ["/mnt/rows.jsonl", "~/rows.jsonl", "../rows.jsonl"])
def test_for_a_path_that_put_does_not_reach_no_put_is_advised(name: str) -> None:
    needs = needs_of(EIGHT_GPUS, "200", load_recipe("tiny-cpu", {"data.train": [name]}), HERE)
    finding = check(judge(with_paths(needs, **{name: {"kind": None}}), needs), "data")
    assert "make put" not in finding.fix.replace("`make put`", "")
    assert f"bring {name} there" in finding.fix


def test_a_name_that_may_be_the_hubs_is_no_fault_and_is_told() -> None:
    needs = needs_of(EIGHT_GPUS, "200", load_recipe("qwen3-8b", {}))
    finding = check(judge(with_paths(needs, **{"Qwen/Qwen3-8B": {"kind": None}}), needs), "target")
    assert finding.severity == "ok"
    assert "Hugging Face hub" in finding.seen


def test_a_run_that_is_going_on_is_told_with_the_gpus_that_it_holds_and_is_no_fault() -> None:
    run = {"run_id": "20261130-101010-abcdef", "state": "running"}
    held = recorded("eight-gpus", "held-by-a-run")
    facts = {**held.facts, "runs": [run]}
    for who in facts["gpu_processes"]:
        who["nodes"] = ["/dev/nvidia1", "/dev/nvidia0"]
    findings = judge(Seen(facts, held.config, cuda=held.cuda), NEEDS)
    assert worst(findings) == "warning"
    job = check(findings, "job")
    assert job.seen == "run 20261130-101010-abcdef is running; it holds nvidia0, nvidia1"
    assert "make logs FOLLOW=1 RUN_ID=20261130-101010-abcdef" in job.fix
    assert check(findings, "free").severity == "warning"
    facts["gpu_processes"].append(
        {"pid": 9, "command": "python -m sglang", "run_id": None, "nodes": ["/dev/nvidia0"]}
    )
    assert check(judge(Seen(facts, held.config), NEEDS), "free").severity == "error"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("models/draft", "TO=models/draft"),
        ("runs/20260101-0", "make status HOST="),
        ("targets/x", "or the tool's own"),
    ],
)
def test_the_drafter_that_a_run_begins_with_is_looked_for_unless_it_goes_on(name: str, advice: str) -> None:
    recipe = load_recipe("smollm2", {"train.from_pretrained": name})
    needs = needs_of(EIGHT_GPUS, "200", recipe, HERE)
    assert check(judge(with_paths(needs, **{name: {"kind": "folder"}}), needs), "drafter").severity == "ok"
    finding = check(judge(with_paths(needs, **{name: {"kind": None}}), needs), "drafter")
    assert (finding.severity, advice in finding.fix) == ("error", True), finding
    resumed = needs_of(EIGHT_GPUS, "200", recipe, HERE, resumes=True)
    assert "drafter" not in {found.check for found in judge(with_paths(resumed), resumed)}
