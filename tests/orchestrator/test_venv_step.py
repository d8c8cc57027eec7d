"""The venv step on the embedded node, with real uv and wheels made on the spot in place of torch and its company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.agent import Agent
from orchestrator.connection import Connection
from orchestrator.console import Console
from orchestrator.container import Container
from orchestrator.deploy import deploy
from orchestrator.errors import RefusedError, RemoteError
from orchestrator.inventory import Destination
from orchestrator.settings import IndexSettings, TorchPin
from orchestrator.venv import BuiltVenv, build_venv
from orchestrator.wheelhouse import Platform, container_platform, resolve_wheels
from tests.wheels import build_torch_wheel, build_wheel

QUIET = Console(quiet=True)


@pytest.fixture
def links(tmp_path: Path) -> Path:
    folder = tmp_path / "links"
    build_torch_wheel(folder)
    build_wheel(folder, "companion", "1.2", {"companion.py": "answer = 42\n"})
    return folder


@pytest.fixture
def place(
    connection: Connection,
    destination: Destination,
    links: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Container:
    """A container with a root of its own, whose packages come from ``links`` alone."""
    payload = tmp_path / "payload"
    payload.mkdir()
    (payload / "requirements.txt").write_text("companion==1.2\n")
    monkeypatch.setattr("orchestrator.venv.PAYLOAD", payload)
    monkeypatch.setattr("orchestrator.venv.IMPORTS", ("torch", "companion"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = replace(
        destination.container,
        root=f"{destination.container.root}/{tmp_path.name}",
        torch=TorchPin(version="2.13.0", backend=None),
        index=IndexSettings(find_links=(str(links),), offline=True),
    )
    return Container(connection, replace(destination, container=settings))


def venv(container: Container, *, wheelhouse: bool = False, force: bool = False) -> BuiltVenv:
    with QUIET.step("deploy") as report:
        agent = Agent.of_release(container, deploy(container, report).release)
        return build_venv(container, agent, report, wheelhouse=wheelhouse, force=force)


def repinned(container: Container, **changes: object) -> Container:
    settings = replace(container.settings, **changes)
    return Container(container.connection, replace(container.destination, container=settings))


def in_use(container: Container) -> str:
    return (Path(container.settings.root) / "venv").resolve().name


def test_a_venv_is_built_once_and_found_the_second_time(place: Container) -> None:
    first, second = venv(place), venv(place)
    assert (first.created, second.created) == (True, False)
    assert first.venv == second.venv == in_use(place)
    assert second.torch_version == "2.13.0+cpu"
    python = f"{place.settings.root}/venvs/{first.venv}/bin/python"
    assert place.run([python, "-c", "import companion; print(companion.answer)"]).stdout == b"42\n"


def test_another_pin_gets_a_venv_of_its_own_and_the_old_one_stays(place: Container, links: Path) -> None:
    first = venv(place)
    build_torch_wheel(links, "2.13.1+cpu")
    other = venv(repinned(place, torch=TorchPin(version="2.13.1", backend=None)))
    assert other.venv != first.venv
    assert in_use(place) == other.venv
    back = venv(place)
    assert (back.venv, back.created) == (first.venv, False)


def test_a_rebuild_never_touches_the_compile_cache(place: Container) -> None:
    venv(place)
    kernel = Path(place.settings.root) / "cache" / "fingerprint" / "inductor" / "kernel"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"compiled")
    assert venv(place, force=True).created
    assert kernel.read_bytes() == b"compiled"


@pytest.mark.parametrize(
    ("pin", "words"),
    [
        (TorchPin(version="2.13.0", backend=None, git="70d99e998b"), "git"),
        (TorchPin(version="2.13.0", backend=None, cuda="12.8"), "12.8"),
    ],
)
def test_a_pin_that_resolves_to_another_build_is_refused_and_the_venv_in_use_stays(
    place: Container, pin: TorchPin, words: str
) -> None:
    before = venv(place)
    with pytest.raises(RefusedError, match="pinned") as raised:
        venv(repinned(place, torch=pin))
    assert words in raised.value.message
    assert raised.value.exit_status == 4
    assert in_use(place) == before.venv
    assert [path.name for path in (Path(place.settings.root) / "venvs").iterdir()] == [before.venv]


def test_a_package_that_cannot_be_had_is_named_and_nothing_half_built_stays(place: Container) -> None:
    with pytest.raises(RemoteError, match=r"2\.99\.0"):
        venv(repinned(place, torch=TorchPin(version="2.99.0", backend=None)))
    assert list((Path(place.settings.root) / "venvs").iterdir()) == []


def test_a_container_without_any_index_gets_its_wheels_from_the_desk(place: Container, links: Path) -> None:
    built = venv(place, wheelhouse=True)
    assert built.created
    sent = {path.name for path in (Path(place.settings.root) / "wheelhouse").iterdir()}
    assert sent == {path.name for path in links.iterdir()}


def test_the_wheels_are_resolved_for_the_containers_platform_with_their_hashes(
    links: Path, tmp_path: Path
) -> None:
    platform = Platform("x86_64", (2, 36), "3.11.7")
    (tmp_path / "requirements.txt").write_text("companion==1.2\n")
    index = IndexSettings(find_links=(str(links),), offline=True)
    locked = resolve_wheels(
        TorchPin(version="2.13.0", backend=None), index, platform, tmp_path / "requirements.txt"
    )
    assert sorted(wheel.name for wheel in locked) == sorted(path.name for path in links.iterdir())
    assert all(len(wheel.sha256) == 64 for wheel in locked)


def test_an_older_glibc_takes_fewer_wheels() -> None:
    new, old = Platform("x86_64", (2, 36), "3.12.1"), Platform("x86_64", (2, 17), "3.12.1")
    assert "manylinux_2_28_x86_64" in new.wheel_tags
    assert "manylinux_2_28_x86_64" not in old.wheel_tags
    assert old.python_minor == "3.12"


def test_a_container_without_glibc_is_refused() -> None:
    facts = {"libc": ["musl", "1.2"], "machine": "x86_64", "python": {"version": "3.12.1"}}
    with pytest.raises(RefusedError, match="glibc"):
        container_platform(facts)


def test_of_several_wheels_that_fit_the_one_an_installer_would_take_is_chosen(
    links: Path, tmp_path: Path
) -> None:
    """Packages publish one wheel for a Python, one for the stable ABI, and one without extensions."""
    files = {"several.py": ""}
    for tag in (
        "py3-none-any",
        "cp37-abi3-manylinux_2_5_x86_64.manylinux_2_28_x86_64",
        "cp311-cp311-manylinux_2_28_x86_64",
    ):
        build_wheel(links, "several", "1.0", files, tag=tag)
    (tmp_path / "requirements.txt").write_text("several==1.0\n")
    index = IndexSettings(find_links=(str(links),), offline=True)

    def chosen(platform: Platform) -> str:
        locked = resolve_wheels(
            TorchPin(version="2.13.0", backend=None), index, platform, tmp_path / "requirements.txt"
        )
        return next(wheel.name for wheel in locked if wheel.name.startswith("several"))

    assert "cp311-cp311" in chosen(Platform("x86_64", (2, 36), "3.11.7"))
    assert "abi3" in chosen(Platform("x86_64", (2, 36), "3.12.1"))
    assert "py3-none-any" in chosen(Platform("aarch64", (2, 36), "3.12.1"))
