"""A desk whose user has no name and no home: what needs neither works, and what needs one says so."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import NoReturn

import fabric
import pytest

from orchestrator.agent import Agent, NoAnswer
from orchestrator.connection import Connection
from orchestrator.container import Container
from orchestrator.desk_account import give_getpass_a_name, own_path, user_name
from orchestrator.errors import UsageError
from orchestrator.hostkeys import trust_only_known_hosts
from orchestrator.inventory import Destination
from orchestrator.localnode import node
from orchestrator.records import records_folder
from orchestrator.wheelhouse import cache_folder

NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable names the user, and no entry of passwd does."""

    def unknown(user: object) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    for name in (*NAMES, "HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    # What the product sets for the libraries that it uses is taken back with the test.
    monkeypatch.setenv("LOGNAME", "")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)


@pytest.mark.usefixtures("nameless")
def test_a_user_without_a_name_is_its_number(destination: Destination) -> None:
    assert user_name() == str(os.geteuid())
    with Connection("local", destination.host) as connection:
        assert connection.run(["echo", "in"]).stdout == b"in\n"
        with pytest.raises(NoAnswer):
            Agent(Container(connection, destination), "/nowhere").call("hello")


@pytest.mark.usefixtures("nameless")
@pytest.mark.parametrize("place", [records_folder, cache_folder, lambda: node._absolute(Path("~/node"))])
def test_what_lies_at_home_is_a_usage_error_without_one(place: object) -> None:
    with pytest.raises(UsageError, match="no such home folder") as raised:
        place()  # type: ignore[operator]
    assert "HOME" in raised.value.hint


@pytest.mark.usefixtures("nameless")
def test_without_a_home_the_known_hosts_of_the_machine_are_those() -> None:
    give_getpass_a_name()
    trust_only_known_hosts(fabric.Connection("lab", config=fabric.Config(lazy=True)), None)


@pytest.mark.parametrize("variable", ["XDG_STATE_HOME", "XDG_CACHE_HOME"])
def test_the_home_of_a_user_that_is_not_there_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "~nosuch/x")
    with pytest.raises(UsageError, match="~nosuch/x: the desk knows of no such home folder"):
        records_folder() if variable == "XDG_STATE_HOME" else cache_folder()
    assert own_path("/as/it/is") == Path("/as/it/is")
