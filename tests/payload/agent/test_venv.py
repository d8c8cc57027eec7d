"""A venv is built beside the one in use, by the real uv, and switched to only when it is what is pinned."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.payload.agent.container import VENV, FakeContainer, until, wait_until_written
from tests.payload.agent.venvs import PIN, in_use, is_clean, request
from tests.payload.agent.wheels import make_wheel


def test_a_venv_is_built_verified_and_switched_to(container: FakeContainer, wheels: Path) -> None:
    (container.root / "cache/fingerprint").mkdir(parents=True)
    (container.root / "cache/fingerprint/kernel").write_text("compiled")
    reply = container.ask("venv", **request(wheels))
    assert reply.result is not None, reply
    built = reply.result
    assert built["created"]
    assert built["torch"]["version"] == "2.11.0+cu128"
    assert built["torch"]["cuda"] == "12.8"
    assert built["packages"] == {"torch": "2.11.0+cu128", "needy": "1.0"}
    assert in_use(container) == built["venv"]
    assert is_clean(container)
    assert any("needy==1.0" in event.get("message", "") for event in reply.events)
    assert (container.root / "cache/fingerprint/kernel").read_text() == "compiled"


def test_torchrun_works_in_a_venv_that_was_renamed_into_place(container: FakeContainer, wheels: Path) -> None:
    built = container.result("venv", **request(wheels))
    folder = container.root / "venvs" / built["venv"]
    done = subprocess.run(
        [str(folder / "bin/python"), "-m", "torch.distributed.run"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert f"run by {folder / 'bin/python'} {folder}\n" in done.stdout


def test_the_same_venv_again_is_found_fast(container: FakeContainer, wheels: Path) -> None:
    first = container.result("venv", **request(wheels))
    again = container.result("venv", **request(wheels))
    assert not again["created"]
    assert again["seconds"] < 2
    assert {name: again[name] for name in ("venv", "torch", "packages")} == {
        name: first[name] for name in ("venv", "torch", "packages")
    }


def test_a_check_needs_no_uv_and_makes_nothing(container: FakeContainer, wheels: Path) -> None:
    asked = request(wheels, uv=None, check=True)
    assert container.result("venv", **asked)["present"] is False
    built = container.result("venv", **request(wheels))
    (container.root / "venv").unlink()
    (container.root / "venv").symlink_to(f"venvs/{VENV}")
    found = container.result("venv", **asked)
    assert found["present"] is True
    assert found["torch"] == built["torch"]
    assert in_use(container) == built["venv"]


def test_a_venv_that_lost_a_package_is_built_anew(container: FakeContainer, wheels: Path) -> None:
    built = container.result("venv", **request(wheels))
    (info,) = (container.root / "venvs" / built["venv"]).glob("lib/python*/site-packages/needy-*.dist-info")
    info.rename(info.with_name("gone"))
    assert container.result("venv", **request(wheels))["created"]
    assert info.exists()


def test_force_builds_anew_under_the_same_name(container: FakeContainer, wheels: Path) -> None:
    built = container.result("venv", **request(wheels))
    mark = container.root / "venvs" / built["venv"] / "mark"
    mark.touch()
    again = container.result("venv", **request(wheels, force=True))
    assert again["created"]
    assert again["venv"] == built["venv"]
    assert not mark.exists()
    assert is_clean(container)


def test_a_venv_that_a_run_uses_is_not_built_anew(container: FakeContainer, wheels: Path) -> None:
    built = container.result("venv", **request(wheels))
    container.start("r1", "import time; time.sleep(600)", venv=built["venv"])
    error = container.error("venv", **request(wheels, force=True))
    assert error["kind"] == "busy"
    assert "r1" in error["message"]


def test_a_venv_that_a_lost_job_still_uses_is_neither_built_anew_nor_pruned(
    container: FakeContainer, wheels: Path
) -> None:
    built = container.result("venv", **request(wheels))
    container.start("r1", "import time; time.sleep(600)", venv=built["venv"])
    os.kill(container.state_file("r1")["supervisor"]["pid"], signal.SIGKILL)
    container.wait_for_state("r1", "lost")
    error = container.error("venv", **request(wheels, force=True))
    assert error["kind"] == "busy"
    assert "r1 is lost" in error["message"]
    (container.root / "venv").unlink()
    container.result("prune", keep=0)
    assert (container.root / "venvs" / built["venv"] / "bin/python").exists()
    container.result("stop", run_id="r1", grace_s=0)
    assert container.state("r1")["left"] == []
    assert container.result("venv", **request(wheels, force=True))["created"]


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ({**PIN, "cuda": "13.0"}, "pinned 13.0, found 12.8"),
        ({**PIN, "git": "aaaa"}, "pinned aaaa, found 70d99e998b"),
        ({"version": "2.11.0+cu128", "cuda": None, "backend": "cu130"}, "cu128"),
        ({"version": "2.11.0", "backend": "cpu"}, "pinned a CPU build, found 12.8"),
        ({"version": "2.11.0", "backend": "cu130"}, "pinned 13.0 (cu130), found 12.8"),
    ],
)
def test_another_build_than_the_pinned_one_is_refused(
    container: FakeContainer, wheels: Path, pin: dict[str, Any], said: str
) -> None:
    reply = container.ask("venv", **request(wheels, torch=pin))
    if said == "cu128":
        assert reply.result is not None, "the version's own local part decides before the backend"
        return
    assert reply.error is not None
    assert reply.error["kind"] == "refused"
    assert said in reply.error["message"]
    assert in_use(container) == VENV
    assert is_clean(container)
    assert [path.name for path in (container.root / "venvs").iterdir()] == [VENV]


def test_an_import_that_fails_is_refused_by_name(container: FakeContainer, wheels: Path) -> None:
    make_wheel(wheels, "broken", "1.0", {"broken.py": "import nowhere\n"})
    error = container.error("venv", **request(wheels, requirements="broken==1.0", imports=["broken"]))
    assert error["kind"] == "refused"
    assert "broken" in error["message"]
    assert "nowhere" in error["message"]
    assert in_use(container) == VENV
    assert is_clean(container)


def test_a_venv_that_fills_the_disk_is_not_used(container: FakeContainer, wheels: Path) -> None:
    small = container.root / "venvs"
    mount = ["mount", "-t", "tmpfs", "-o", "size=14m", "tmpfs", str(small)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    try:
        assert "disk is full" in container.error("venv", **request(wheels))["message"]
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_nothing_that_a_build_leaves_is_writable_for_others(container: FakeContainer, wheels: Path) -> None:
    container.result("venv", **request(wheels))
    made = [path for name in ("venvs", "uv-cache") for path in (container.root / name).rglob("*")]
    assert [path for path in made if path.name == ".lock"]
    assert not [path for path in made if not path.is_symlink() and path.stat().st_mode & 0o022]


def test_an_interrupted_build_is_removed_by_the_next_and_nothing_of_it_goes_on(
    container: FakeContainer, wheels: Path
) -> None:
    slow = "import time, pathlib\npathlib.Path(__file__).with_name('importing').touch()\ntime.sleep(600)\n"
    make_wheel(wheels, "slow", "1.0", {"slow.py": slow})
    process = container.open("venv", **request(wheels, requirements="slow==1.0", imports=["slow"]))
    for _ in until():
        if list((container.root / "venvs").glob(".*/lib/python*/site-packages/importing")):
            break
    (leftover,) = (container.root / "venvs").glob(".*")
    busy = container.error("venv", **request(wheels))
    assert busy["kind"] == "busy"
    assert str(process.pid) in busy["message"]
    process.kill()
    process.communicate()
    for _ in until(5):
        if not _users_of(leftover):
            break
    assert not _users_of(leftover)
    assert container.result("venv", **request(wheels))["created"]
    assert not leftover.exists()


def test_a_venv_that_a_call_uses_is_not_built_anew(
    container: FakeContainer, wheels: Path, tmp_path: Path
) -> None:
    built = container.result("venv", **request(wheels))["venv"]
    asked = container.open("call", module="payload.hangs", venv=built, env={"PIDS": str(tmp_path / "pid")})
    wait_until_written(tmp_path / "pid.grandchild")
    busy = container.error("venv", **request(wheels, force=True))
    assert (busy["kind"], built in busy["message"]) == ("busy", True)
    assert not container.result("venv", **request(wheels))["created"]
    asked.send_signal(signal.SIGTERM)
    asked.communicate(timeout=20)
    assert container.result("venv", **request(wheels, force=True))["created"]


def _users_of(folder: Path) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and os.fsencode(folder) in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_a_build_is_ended_in_order_when_its_agent_is_told_to(container: FakeContainer, wheels: Path) -> None:
    make_wheel(wheels, "slow", "1.0", {"slow.py": "import time\ntime.sleep(600)\n"})
    process = container.open("venv", **request(wheels, requirements="slow==1.0", imports=["slow"]))
    for _ in until():
        if list((container.root / "venvs").glob(".*/lib/python*/site-packages/slow.py")):
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert is_clean(container)
    assert in_use(container) == VENV


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_torch_is_installed_and_described(container: FakeContainer) -> None:
    """With the desk's own pip settings, as pip itself reports them."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    settings_found = dict(line.split("=", 1) for line in listed.splitlines() if "=" in line)
    links = [value.strip("'\"") for key, value in settings_found.items() if key.endswith("find-links")]
    local = [path for link in links for path in Path(link).glob("torch-*.whl")]
    if not local:
        pytest.skip("no torch wheel among the desk's find-links")
    version = local[0].name.split("-")[1].replace("%2B", "+")
    index = {"find_links": [str(local[0].parent)]}
    asked = request(None, torch={"version": version}, requirements="", index=index, imports=[])
    built = container.result("venv", **asked)
    assert built["torch"]["version"] == version
    assert len(built["torch"]["git"]) == 40
    python = container.root / "venvs" / built["venv"] / "bin/python"
    done = subprocess.run(
        [str(python), "-m", "torch.distributed.run", "--help"], capture_output=True, timeout=120
    )
    assert done.returncode == 0
    assert json.dumps(built["packages"])
