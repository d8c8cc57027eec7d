"""What is told of a run: its state after restarts, its last metrics, its checkpoints."""

from __future__ import annotations

import json
import os

from tests.payload.agent.container import FakeContainer


def test_a_run_from_before_a_restart_of_the_container_alone_is_lost_and_the_restart_is_named(
    container: FakeContainer,
) -> None:
    container.start("r1", "")
    container.wait_for_state("r1", "finished")
    path = container.root / "runs/r1/state.json"
    # A container may have its host's boot id, but it has a process 1 of its own.
    state = {**json.loads(path.read_text()), "state": "running", "init_start_time": -1}
    path.write_text(json.dumps(state))
    assert container.state("r1")["reason"] == "the container was restarted while it ran"


def test_a_run_of_an_earlier_boot_is_lost(container: FakeContainer) -> None:
    container.start("r1", "")
    container.wait_for_state("r1", "finished")
    state = container.state_file("r1")
    old = {"pid": os.getpid(), "start_time": 1, "boot_id": "another"}
    state |= {"state": "running", "boot_id": "another", "supervisor": old, "job": old}
    (container.root / "runs/r1/state.json").write_text(json.dumps(state))
    lost = container.state("r1")
    assert lost["state"] == "lost"
    assert "restarted" in lost["reason"]
    assert lost["left"] == []
    assert "stop" not in lost["hint"]


def test_the_last_metrics_are_the_newest_of_each_kind_in_whole_lines(container: FakeContainer) -> None:
    lines = ['{"step": 1, "loss": 2.5}', '{"step": 2, "accepted_length": 3.0, "loss": null}', '{"st']
    container.start("r1", f"open('metrics.jsonl', 'w').write({chr(10).join(lines)!r})")
    newest = container.wait_for_state("r1", "finished")["last_metrics"]
    assert newest == {"step": 2, "loss": 2.5, "accepted_length": 3.0}


def test_the_last_held_out_length_is_told_however_many_steps_ago_it_was_measured(
    container: FakeContainer,
) -> None:
    program = (
        "file = open('metrics.jsonl', 'w')\n"
        'file.write(\'{"step": 0, "accepted_length": 1.5}\\n{"step": 1, "accepted_length": null}\\n\')\n'
        'for n in range(4000): file.write(\'{"step": %d, "simulated_accepted_length": 9}\\n\' % n)\n'
    )
    container.start("r1", program)
    newest = container.wait_for_state("r1", "finished")["last_metrics"]
    assert (newest["step"], newest["accepted_length"]) == (3999, 1.5)


def test_a_run_tells_its_recipe_and_the_steps_of_its_whole_checkpoints(container: FakeContainer) -> None:
    container.start("r1", "pass", recipe={"name": "mine", "train": {"steps": 300}}, resume_from="../r0")
    checkpoints = container.root / "runs/r1/checkpoints"
    for name in ("step-000100", "step-000300", "step-1000000", ".step-000400.half"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "manifest.json").touch()
    (checkpoints / "step-000200").mkdir()
    run = container.wait_for_state("r1", "finished")
    assert (run["recipe"], run["steps"], run["resumed"]) == ("mine", 300, "r0")
    assert run["checkpoints"] == [100, 300, 1_000_000]
