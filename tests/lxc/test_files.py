"""Files: what arrives damaged, half, or not at all is noticed by its hash, removed and told; what was in use stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.agent import Agent
from orchestrator.connection import Connection
from orchestrator.console import Console
from orchestrator.container import Container
from orchestrator.deploy import PAYLOAD, Payload, deploy
from orchestrator.errors import RemoteError, UsageError
from orchestrator.fetch import fetch
from orchestrator.inventory import Destination, load_inventory, resolve
from orchestrator.status import status, stop
from tests.lxc.bed import HOST, PRIVILEGED, UNPRIVILEGED, Bed
from tests.lxc.conftest import QUIET
from tests.lxc.desk import Desk
from tests.lxc.jobs import start, state_of, until, wait_for
from tests.lxc.lxc import Lxc
from tests.program_runs import VENV

SMALL = "/opt/small"
HOLDS_A_LOCK = """
import sys, time
sys.path.insert(0, sys.argv[1])
from payload.agent.layout import Layout
from payload.agent.locks import hold
with hold(Layout.at(sys.argv[2]), "venv", "venv", "ann@another-desk"):
    time.sleep(600)
"""


@pytest.fixture
def small(lxc: Lxc) -> Iterator[str]:
    """A root on a disk of 12 MB in container 200."""
    lxc.run(["mkdir", "-p", SMALL])
    lxc.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", SMALL])
    yield f"{SMALL}/dflash"
    until(lambda: lxc.run(["umount", SMALL], check=False).returncode == 0)


@pytest.fixture
def changed_payload(tmp_path: Path) -> Payload:
    """Another release: the desk's with one more file of a megabyte."""
    folder = tmp_path / "changed" / "payload"
    shutil.copytree(PAYLOAD, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "more.bin").write_bytes(os.urandom(1_000_000))
    return Payload(folder)


def at_root(container: Container, root: str, **changes: object) -> Container:
    """The same container with another root."""
    settings = replace(container.settings, root=root, **changes)
    return Container(container.connection, replace(container.destination, container=settings))


def fill(lxc: Lxc, folder: str, leave_bytes: int) -> str:
    """Fill the disk of ``folder`` but for ``leave_bytes``; returns the file that does."""
    free = shutil.disk_usage(lxc.root / folder.lstrip("/")).free
    path = f"{folder}/ballast"
    lxc.run(["fallocate", "-l", str(free - leave_bytes), path])
    return path


def deploy_to(container: Container, payload: Payload | None = None) -> str:
    with QUIET.step("deploy") as report:
        return deploy(container, report, payload).release


def entries(lxc: Lxc, folder: str) -> list[str]:
    """The names in a folder of the container, those that begin with a dot among them."""
    done = lxc.run(["ls", "-A", folder], check=False)
    return done.stdout.split()


@pytest.mark.parametrize("kept", ["half", "nothing"])
def test_an_upload_that_is_truncated_on_its_way_is_noticed_though_every_exit_status_says_ok(
    container: Container, agent: Agent, changed_payload: Payload, lxc: Lxc, kept: str
) -> None:
    lxc.run(["mkdir", "-p", "/opt/evil"])
    # As pct push: the target is there, short, and the exit status is 0.
    half = 'tar "$@"; for f in /opt/dflash/incoming/*; do truncate -s 100000 "$f"; done; exit 0'
    script = f"#!/bin/sh\nPATH=/usr/bin:/bin\n{half if kept == 'half' else 'cat > /dev/null'}\n"
    lxc.run(["sh", "-c", "cat > /opt/evil/tar && chmod 755 /opt/evil/tar"], stdin=script)
    path = ("/opt/evil", *container.settings.path)
    current = status(agent)["release"]
    with pytest.raises(RemoteError, match="did not arrive whole") as raised:
        deploy_to(at_root(container, container.settings.root, path=path), changed_payload)
    assert "the release in use stays so" in raised.value.hint
    assert entries(lxc, "/opt/dflash/incoming") == []
    assert status(agent)["release"] == current


def test_a_release_whose_files_were_changed_is_noticed_by_its_hash_and_replaced(
    container: Container, agent: Agent, lxc: Lxc
) -> None:
    release = deploy_to(container)
    file = f"/opt/dflash/releases/{release}/payload/recipe.py"
    lxc.run(["sh", "-c", f"echo '# changed' >> {file}"])
    assert deploy_to(container) == release
    assert lxc.run(["tail", "-1", file]).stdout != "# changed\n"


def test_a_deploy_on_a_full_disk_says_so_leaves_nothing_and_the_old_release_works(
    container: Container, lxc: Lxc, small: str, changed_payload: Payload
) -> None:
    place = at_root(container, small)
    old = deploy_to(place)
    for leave_bytes in (100_000, 2_500_000):  # the upload does not fit; it fits, and what it holds does not
        ballast = fill(lxc, SMALL, leave_bytes)
        with pytest.raises(RemoteError, match=r"no space left|disk is full"):
            deploy_to(place, changed_payload)
        assert entries(lxc, f"{small}/incoming") == []
        assert entries(lxc, f"{small}/releases") == [old]
        assert status(Agent.current(place))["release"] == old
        lxc.run(["rm", ballast])
    assert deploy_to(place, changed_payload) != old


def test_a_venv_that_does_not_fit_on_the_disk_says_so_and_leaves_nothing(
    home: Path, inventory: Callable[..., Path], lxc: Lxc, small: str
) -> None:
    desk = Desk(home, inventory(root=small), PRIVILEGED)
    desk.ok("deploy")
    done = desk.run("venv")
    assert done.status == RemoteError.exit_status
    assert "no space left on its disk" in done.text
    assert entries(lxc, f"{small}/tools") == []
    assert desk.status()["venv"] is None


def test_a_job_whose_log_fills_the_disk_can_be_seen_and_stopped(
    container: Container, agent: Agent, lxc: Lxc, small: str
) -> None:
    place = at_root(container, small)
    deployed = Agent.of_release(place, deploy_to(place))
    place.run(["mkdir", "-p", f"{small}/venvs/{VENV}/bin"])
    place.run(["ln", "-sfn", "/usr/bin/python3", f"{small}/venvs/{VENV}/bin/python"])
    fills = (
        "import os, time\ntry:\n    while True: os.write(1, bytes(65536))\nexcept OSError: time.sleep(600)"
    )
    run_id = start(deployed, fills)
    until(lambda: shutil.disk_usage(lxc.root / "opt/small").free < 65536)
    assert state_of(deployed, run_id)["state"] == "running"
    pid = state_of(deployed, run_id)["pid"]
    with QUIET.step("stop") as report:
        stop(deployed, run_id, report, grace_s=0.5)
    assert not lxc.is_alive(pid)
    lxc.run(["truncate", "--size=0", f"{small}/runs/{run_id}/output.log"])
    wait_for(deployed, run_id, "stopped")


@pytest.mark.parametrize("thing", ["file", "folder"])
def test_what_is_in_the_way_is_replaced_or_named(container: Container, lxc: Lxc, thing: str) -> None:
    """A file where the release goes is replaced; a folder where the link to it goes is a person's to move."""
    place = at_root(container, f"/opt/in-the-way-{thing}")
    release = Payload().release
    lxc.run(["mkdir", "-p", f"{place.settings.root}/releases"])
    if thing == "file":
        lxc.run(["touch", f"{place.settings.root}/releases/{release}"])
        assert deploy_to(place) == release
        return
    lxc.run(["mkdir", "-p", f"{place.settings.root}/current/mine"])
    with pytest.raises(RemoteError, match=r"directory.*current"):
        deploy_to(place)
    assert entries(lxc, f"{place.settings.root}/current") == ["mine"]


def test_a_folder_in_the_way_of_an_upload_is_named(container: Container, lxc: Lxc) -> None:
    lxc.run(["mkdir", "-p", "/opt/taken/file"])
    with pytest.raises(RemoteError, match="/opt/taken/file could not be put in place"):
        container.upload(b"bytes", "/opt/taken/file")
    assert entries(lxc, "/opt/taken") == ["file"]


def test_in_an_unprivileged_container_all_belongs_to_its_root_and_a_job_runs(
    bed: Bed, unprivileged: Lxc
) -> None:
    with open_container(bed, UNPRIVILEGED) as container:
        agent = Agent.of_release(container, deploy_to(container))
        container.run(["mkdir", "-p", f"/opt/dflash/venvs/{VENV}/bin"])
        container.run(["ln", "-sfn", "/usr/bin/python3", f"/opt/dflash/venvs/{VENV}/bin/python"])
        run_id = start(agent, "import os; print(os.getuid())")
        wait_for(agent, run_id, "finished")
        assert container.run(["cat", f"/opt/dflash/runs/{run_id}/output.log"]).stdout == b"0\n"
        unit = f"dflash-{run_id}.service"
        assert unit in unprivileged.run(["journalctl", "--no-pager", "--unit", unit]).stdout
    outside = {path.lstat().st_uid for path in (unprivileged.root / "opt/dflash").rglob("*")}
    assert outside == {100_000}


def test_a_root_that_the_host_made_for_an_unprivileged_container_is_explained(
    bed: Bed, unprivileged: Lxc
) -> None:
    folder = unprivileged.root / "opt/from-the-host"
    folder.mkdir()
    try:
        with open_container(bed, UNPRIVILEGED) as container, pytest.raises(RemoteError) as raised:
            deploy_to(at_root(container, "/opt/from-the-host/dflash"))
        assert "Permission denied" in raised.value.message
        assert "chown -R 100000:100000" in raised.value.hint
    finally:
        folder.rmdir()


def open_container(bed: Bed, container_id: str) -> _Opened:
    return _Opened(resolve(load_inventory(bed.inventory), HOST, container_id, bed.inventory))


class _Opened:
    """A container over a connection of its own."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._connection = Connection(HOST, destination.host)

    def __enter__(self) -> Container:
        return Container(self._connection, self._destination)

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def test_deploys_of_two_releases_at_once_both_arrive_whole_and_one_of_them_is_current(
    bed: Bed, lxc: Lxc, changed_payload: Payload
) -> None:
    root = "/opt/two-at-once"
    payloads = [Payload(), changed_payload] * 2
    failed: list[BaseException] = []

    def one(payload: Payload) -> None:
        try:
            with open_container(bed, PRIVILEGED) as container, Console(quiet=True).step("deploy") as report:
                deploy(at_root(container, root), report, payload)
        except BaseException as error:  # noqa: BLE001 - the test's own thread tells of it
            failed.append(error)

    threads = [threading.Thread(target=one, args=(payload,)) for payload in payloads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    releases = {payload.release for payload in payloads}
    assert set(entries(lxc, f"{root}/releases")) == releases
    with open_container(bed, PRIVILEGED) as container:
        for release in releases:
            assert Agent.of_release(at_root(container, root), release).call("hello", {"release": release})
        assert status(Agent.current(at_root(container, root)))["release"] in releases


@pytest.mark.parametrize("victim", ["agent", "controller", "container"])
def test_a_venv_build_that_is_interrupted_leaves_the_old_venv_in_use_and_is_cleaned_up(
    home: Path, inventory: Callable[..., Path], lxc: Lxc, victim: str
) -> None:
    root = f"/opt/interrupted-{victim}"
    desk = Desk(home, inventory(root=root), PRIVILEGED)
    desk.ok("venv")
    old = desk.status()["venv"]
    building = desk.open("venv", "--force")
    until(lambda: [name for name in entries(lxc, f"{root}/venvs") if name.startswith(".")], every_s=0.02)
    if victim == "controller":
        os.killpg(building.pid, signal.SIGKILL)
    elif victim == "container":
        lxc.restart()
    else:
        for pid in lxc.pids("payload/agent venv"):
            lxc.run(["kill", "-9", str(pid)], check=False)
    building.communicate(timeout=60)
    assert building.returncode != 0
    until(lambda: not lxc.pids(f"{root}/venvs/."))
    assert desk.status()["venv"] == old
    assert lxc.run([f"{root}/venv/bin/python", "-c", "import torch"]).returncode == 0
    desk.ok("venv", "--force")
    assert entries(lxc, f"{root}/venvs") == [old]


def test_a_container_that_loses_power_during_a_deploy_has_the_old_release(
    container: Container, agent: Agent, lxc: Lxc, changed_payload: Payload
) -> None:
    root = "/opt/power"
    place = at_root(container, root)
    old = deploy_to(place)
    release = changed_payload.release

    def cut_power() -> None:
        until(
            lambda: any(name.startswith(release) for name in entries(lxc, f"{root}/incoming")), every_s=0.01
        )
        lxc.kill()

    cutting = threading.Thread(target=cut_power)
    cutting.start()
    with pytest.raises(Exception, match=r"bed"):
        deploy_to(place, changed_payload)
    cutting.join()
    lxc.start()
    assert status(Agent.current(place))["release"] in (old, release)
    assert Agent.of_release(place, old).call("hello", {"release": old})["release"] == old
    assert deploy_to(place, changed_payload) == release
    assert set(entries(lxc, f"{root}/releases")) == {old, release}


def test_a_download_that_is_corrupt_is_noticed_by_its_hash_removed_and_told(
    container: Container, agent: Agent, lxc: Lxc, tmp_path: Path
) -> None:
    run_id = start(agent, "print('x' * 100_000)")
    wait_for(agent, run_id, "finished")
    listed = {file["path"]: file for file in agent.call("files", {"run_id": run_id})["files"]}
    home = tmp_path / run_id
    home.mkdir()
    partial = home / f"output.log.{listed['output.log']['sha256'][:16]}.part"
    partial.write_bytes(b"not what the container has")
    with QUIET.step("fetch") as report:
        with pytest.raises(RemoteError, match="did not come home whole") as raised:
            fetch(container, agent, run_id, tmp_path, report)
        assert "The bad copy was removed" in raised.value.hint
        assert not partial.exists()
        fetch(container, agent, run_id, tmp_path, report)
    assert (home / "output.log").read_bytes() == b"x" * 100_000 + b"\n"


def test_a_folder_in_the_way_at_the_desk_is_named(container: Container, agent: Agent, tmp_path: Path) -> None:
    run_id = start(agent, "print('log')")
    wait_for(agent, run_id, "finished")
    (tmp_path / run_id / "output.log").mkdir(parents=True)
    with QUIET.step("fetch") as report, pytest.raises(UsageError, match=r"output\.log cannot be written"):
        fetch(container, agent, run_id, tmp_path, report)


def test_a_lock_that_is_held_shows_its_holder_and_age_and_can_be_broken_knowingly(
    home: Path, inventory: Callable[..., Path], lxc: Lxc
) -> None:
    root = "/opt/locked"
    desk = Desk(home, inventory(root=root), PRIVILEGED)
    desk.ok("venv")
    holder = subprocess.Popen(
        lxc.command(["python3", "-c", HOLDS_A_LOCK, f"{root}/current", root]),
        stdin=subprocess.DEVNULL,
    )
    until(lambda: "ann@another-desk" in desk.ok("locks").text)
    refused = desk.run("venv", "--force")
    assert refused.status == 4
    assert "the lock 'venv' is held by ann@another-desk for" in refused.text
    assert "make locks HOST=bed CT=200" in refused.text
    assert " BREAK=venv ends that process" in refused.text
    assert "ended the holder of venv; 0 held" in desk.ok("locks", "--break", "venv").text
    assert holder.wait(20) != 0
    desk.ok("venv", "--force")
