"""A venv is built beside the one in use, by the real uv, and switched to only when it is what is pinned."""

from __future__ import annotations

import base64
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uv
from hypothesis import given, settings
from hypothesis import strategies as st

from payload.agent.pins import TorchPin, requirement_lines, venv_name
from payload.agent.redaction import redact
from payload.errors import PayloadError
from tests.payload.agent.container import VENV, FakeContainer, until, wait_until_written
from tests.payload.agent.wheels import make_index, make_torch, make_wheel

PIN = {"version": "2.11.0+cu128", "cuda": "12.8", "git": "70d99e998b"}


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder of wheels: torch, and a package that needs it."""
    folder = tmp_path / "wheels"
    make_torch(folder)
    make_wheel(folder, "needy", "1.0", {"needy.py": "import torch\n"}, requires=("torch>=2",))
    return folder


def request(wheels: Path | None, **changes: Any) -> dict[str, Any]:
    """The fields of `venv` for a container without internet."""
    return {
        "python": sys.executable,
        "uv": uv.find_uv_bin(),
        "requirements": "# a lock\nneedy==1.0  # with a comment\n",
        "torch": PIN,
        "index": {},
        "wheelhouse": str(wheels) if wheels else None,
        "imports": ["needy"],
        "force": False,
        **changes,
    }


def in_use(container: FakeContainer) -> str:
    return (container.root / "venv").resolve().name


def is_clean(container: FakeContainer) -> bool:
    return not [path for path in (container.root / "venvs").iterdir() if path.name.startswith(".")]


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


def test_a_package_that_cannot_be_had_leaves_the_venv_in_use(container: FakeContainer, wheels: Path) -> None:
    error = container.error("venv", **request(wheels, requirements="absent==1.0"))
    assert error["kind"] == "failed"
    assert "absent" in error["message"]
    assert in_use(container) == VENV
    assert is_clean(container)


def test_torch_comes_from_its_own_index_and_from_no_other(container: FakeContainer, tmp_path: Path) -> None:
    own = make_index(tmp_path / "own" / "cu128", [make_torch(tmp_path / "1")])
    tempting = make_torch(tmp_path / "2", version="2.11.0", cuda="13.0", git="bad")
    newer = make_torch(tmp_path / "3", version="2.11.0+cu130", cuda="13.0", git="bad")
    needy = make_wheel(tmp_path / "4", "needy", "1.0", {"needy.py": "import torch\n"}, requires=("torch>=2",))
    common = make_index(tmp_path / "common", [tempting, newer, needy])
    asked = request(None, torch={"version": "2.11.0", "index_url": own}, index={"index_url": common})
    built = container.result("venv", **asked)
    assert built["torch"] == {"version": "2.11.0+cu128", "cuda": "12.8", "git": "70d99e998b" + "0" * 30}


def test_extra_indexes_and_find_links_are_honoured(container: FakeContainer, tmp_path: Path) -> None:
    main = make_index(tmp_path / "main", [make_wheel(tmp_path / "1", "needy", "0.9", {"needy.py": ""})])
    extra = make_index(tmp_path / "extra", [make_wheel(tmp_path / "2", "needy", "1.0", {"needy.py": ""})])
    make_torch(tmp_path / "links")
    index = {"index_url": main, "extra_index_urls": [extra], "find_links": [str(tmp_path / "links")]}
    assert container.result("venv", **request(None, index=index))["packages"]["needy"] == "1.0"


@pytest.fixture
def private_links(tmp_path: Path) -> Iterator[str]:
    """The URL, with its password, of a page on the loopback that lists the wheels only to who has the password."""
    folder = tmp_path / "private"
    make_torch(folder)
    make_wheel(folder, "needy", "1.0", {"needy.py": ""})

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def do_GET(self) -> None:
            if self.headers["Authorization"] == f"Basic {base64.b64encode(b'ann:pa55').decode()}":
                super().do_GET()
            else:
                self.send_error(401)

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://ann:pa55@127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def recording_uv(folder: Path) -> Path:
    """A uv that writes its arguments to ``folder/argv`` before it does its work."""
    program = folder / "recording-uv"
    program.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/argv"\nexec "{uv.find_uv_bin()}" "$@"\n')
    program.chmod(0o755)
    return program


def test_the_password_of_a_page_of_links_is_in_no_argument_and_in_no_file(
    container: FakeContainer, tmp_path: Path, private_links: str
) -> None:
    index = {"index_url": make_index(tmp_path / "empty", []), "find_links": [private_links]}
    reply = container.ask("venv", **request(None, uv=str(recording_uv(tmp_path)), index=index))
    assert reply.result is not None, reply
    assert reply.result["packages"]["needy"] == "1.0"
    assert "pip install" in (tmp_path / "argv").read_text()
    assert "pa55" not in (tmp_path / "argv").read_text()
    assert "pa55" not in json.dumps(reply.events)
    made = [path for path in container.root.rglob("*") if path.is_file()]
    assert not [path for path in made if b"pa55" in path.read_bytes()]


def test_the_password_of_a_requirement_s_url_is_in_no_argument_and_in_no_file(
    container: FakeContainer, tmp_path: Path, private_links: str
) -> None:
    index = {"index_url": make_index(tmp_path / "empty", []), "find_links": [private_links]}
    line = f"needy @ {private_links}needy-1.0-py3-none-any.whl\n"
    asked = request(None, uv=str(recording_uv(tmp_path)), requirements=line, index=index)
    reply = container.ask("venv", **asked)
    assert reply.result is not None, reply
    assert reply.result["packages"]["needy"] == "1.0"
    assert "pa55" not in (tmp_path / "argv").read_text()
    assert "pa55" not in json.dumps(reply.events)
    made = [path for path in container.root.rglob("*") if path.is_file()]
    assert not [path for path in made if b"pa55" in path.read_bytes()]
    changed = container.ask("venv", **{**asked, "requirements": line.replace("pa55", "other"), "check": True})
    assert changed.result is not None
    assert changed.result["venv"] == reply.result["venv"], "a new password is no new venv"


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


def test_folders_of_wheels_may_have_any_name(container: FakeContainer, tmp_path: Path) -> None:
    first, second = tmp_path / "a, b%2C c", tmp_path / "d,é"
    make_torch(first)
    make_wheel(second, "needy", "1.0", {"needy.py": ""})
    index = {"find_links": [str(first), str(second)], "offline": True}
    assert container.result("venv", **request(None, index=index))["packages"]["needy"] == "1.0"
    make_wheel(first, "needy", "1.1", {"needy.py": ""})
    newer = container.result("venv", **request(first, requirements="needy==1.1"))
    assert newer["packages"]["needy"] == "1.1"


def test_a_new_password_of_torch_s_index_is_neither_stored_nor_a_new_venv(
    container: FakeContainer, wheels: Path
) -> None:
    def asked(password: str) -> dict[str, Any]:
        return request(wheels, torch={**PIN, "index_url": f"https://ann:{password}@wheels.test/cu128"})

    first = container.result("venv", **asked("pa55"))
    again = container.result("venv", **asked("w@rd"))
    assert not again["created"]
    assert again["venv"] == first["venv"]
    container.result("venv", **{**asked("w@rd"), "force": True})
    record = (container.root / "venvs" / first["venv"] / "venv.json").read_text()
    assert "https://***@wheels.test/cu128" in record
    assert "pa55" not in record
    assert "rd@" not in record


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


def test_passwords_in_urls_are_not_shown() -> None:
    assert redact("error: https://me:pa55@host/simple/x failed") == "error: https://***@host/simple/x failed"
    assert redact("https://me:p@55@host https://host/x@1") == "https://***@host https://host/x@1"
    with pytest.raises(PayloadError) as raised:
        TorchPin.from_request({"version": "", "index_url": "https://me:pa55@host/"})
    assert "pa55" not in raised.value.message


@pytest.mark.parametrize("text", ["-r other.txt", "--index-url x\nneedy==1"])
def test_options_among_the_requirements_are_refused(text: str) -> None:
    with pytest.raises(PayloadError, match="option"):
        requirement_lines(text)


@given(st.permutations(["a==1 ; python_version < '3.11'", "b==2", "c==3"]))
@settings(max_examples=10, deadline=None)
def test_the_name_does_not_depend_on_the_order_or_comments_of_the_lock(lines: list[str]) -> None:
    text = "\n".join(f"{line}   # why" for line in lines)
    pin = TorchPin("2.11.0")
    assert requirement_lines(text) == sorted(lines)
    assert venv_name(requirement_lines(text), pin, "3.11.7") == venv_name(sorted(lines), pin, "3.11.7")


def test_the_name_depends_on_the_lock_the_pin_and_the_python() -> None:
    names = {
        venv_name(lines, pin, python)
        for lines in ([], ["a==1"])
        for pin in (TorchPin("2.11.0"), TorchPin("2.11.0", git="70d9"), TorchPin("2.11.0", backend="cu128"))
        for python in ("3.11.7", "3.11.8")
    }
    assert len(names) == 12


@pytest.mark.parametrize(
    "fields", [{}, {"version": ""}, {"version": "2 --x"}, {"version": "2.1", "cuda": 12.8}]
)
def test_a_torch_pin_that_cannot_be_one_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PayloadError) as raised:
        TorchPin.from_request(fields)
    assert raised.value.kind == "usage"


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
