"""One bed for the whole session: sshd, and container 200; 201, the unprivileged one, when a test asks for it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.agent import Agent
from orchestrator.connection import Connection
from orchestrator.console import Console
from orchestrator.container import Container
from orchestrator.deploy import deploy
from orchestrator.inventory import Destination, load_inventory, resolve
from orchestrator.status import is_active, status, stop
from tests.lxc import machine, standin
from tests.lxc.bed import HOST, PRIVILEGED, UNPRIVILEGED, Bed
from tests.lxc.desk import Desk
from tests.lxc.lxc import Lxc
from tests.program_runs import VENV

QUIET = Console(quiet=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.lxc)
            if item.get_closest_marker("timeout") is None:
                # Of the test alone: the first one also waits for debootstrap.
                item.add_marker(pytest.mark.timeout(240, func_only=True))
    # The longest first, so that it does not run alone at the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def bed() -> Iterator[Bed]:
    if problem := machine.missing():
        pytest.fail(problem)
    if reason := machine.cannot():
        pytest.skip(reason)
    # Not pytest's own folder: an unprivileged container's root may not pass through it.
    parent = Path(tempfile.mkdtemp(prefix="dflash-bed-"))
    parent.chmod(0o755)
    running = Bed.up(parent / "bed")
    yield running
    running.down()
    parent.rmdir()


@pytest.fixture(scope="session")
def lxc(bed: Bed) -> Lxc:
    """Container 200."""
    return bed.containers[PRIVILEGED]


@pytest.fixture(scope="session")
def unprivileged(bed: Bed) -> Lxc:
    """Container 201."""
    return bed.add(UNPRIVILEGED)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own: no key, no known host, no record is there."""
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOME", str(folder))
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "SSH_AUTH_SOCK"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture(scope="session")
def wheels(bed: Bed, lxc: Lxc) -> str:
    """The folder in container 200 that holds a stand-in of every package."""
    folder = standin.build_wheels(bed.folder / "wheels")
    shutil.copytree(folder, lxc.root / "opt/stand-ins")
    return "/opt/stand-ins"


@pytest.fixture
def inventory(bed: Bed, wheels: str, tmp_path: Path) -> Callable[..., Path]:
    """Writes an inventory of the test's own, whose packages are the stand-ins."""

    def write(**settings: object) -> Path:
        host = settings.pop("host", {})
        light = {
            "torch": {"version": standin.TORCH_VERSION, "backend": None},
            "index": {"find_links": [wheels], "offline": True},
        }
        return bed.write_inventory(tmp_path / "inventory.yaml", host=host, container={**light, **settings})

    return write


@pytest.fixture
def desk(home: Path, inventory: Callable[..., Path]) -> Desk:
    """The command line at container 200."""
    return Desk(home, inventory(), PRIVILEGED)


@pytest.fixture
def destination(bed: Bed) -> Destination:
    return resolve(load_inventory(bed.inventory), HOST, PRIVILEGED, bed.inventory)


@pytest.fixture
def container(destination: Destination) -> Iterator[Container]:
    with Connection(HOST, destination.host) as connection:
        yield Container(connection, destination)


@pytest.fixture
def agent(container: Container) -> Iterator[Agent]:
    """The desk's release in container 200, with a venv that is only an interpreter. Ends what a test left."""
    with QUIET.step("deploy") as report:
        deployed = deploy(container, report)
    place = f"{container.settings.root}/venvs/{VENV}/bin"
    container.run(["mkdir", "-p", place])
    container.run(["ln", "-sfn", "/usr/bin/python3", f"{place}/python"])
    yield Agent.of_release(container, deployed.release)
    with Connection(HOST, container.destination.host) as connection:
        again = Agent.of_release(Container(connection, container.destination), deployed.release)
        for run in status(again)["runs"]:
            if is_active(run):
                with QUIET.step("stop") as report:
                    stop(again, run["run_id"], report, grace_s=0.5)
