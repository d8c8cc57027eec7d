"""Which containers HOST and CT mean: names, lists, ranges and `all`, each container once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import UsageError
from orchestrator.inventory import Inventory
from orchestrator.settings import ContainerSettings, HostSettings
from orchestrator.targets import is_several, select

FILE = Path("inventory.yaml")


def inventory(**hosts: list[str]) -> Inventory:
    return Inventory(
        hosts={
            name: HostSettings(
                address=f"192.0.2.{number}", containers={ct: ContainerSettings() for ct in cts}
            )
            for number, (name, cts) in enumerate(hosts.items(), 1)
        }
    )


TWO = inventory(a=["200", "201", "210"], b=["200", "300"])


def places(host: str | None, container: str | None, known: Inventory = TWO) -> list[str]:
    return [f"{d.host_name}/{d.container_id}" for d in select(known, host, container, FILE)]


@pytest.mark.parametrize(
    ("host", "container", "meant"),
    [
        ("a", "200", "a/200"),
        ("all", None, "a/200 a/201 a/210 b/200 b/300"),
        ("all", "all", "a/200 a/201 a/210 b/200 b/300"),
        ("a", "all", "a/200 a/201 a/210"),
        ("b,a", "200", "b/200 a/200"),
        ("all", "200", "a/200 b/200"),
        ("all", "300", "b/300"),
        ("all", "200-205", "a/200 a/201 b/200"),
        ("a", "210,200-201", "a/210 a/200 a/201"),
        ("a,a", "200,200", "a/200"),
        ("192.0.2.2", "all", "b/200 b/300"),
        ("admin@b", "all", "admin@b/200 admin@b/300"),
        ("198.51.100.7", "200,201", "198.51.100.7/200 198.51.100.7/201"),
    ],
)
def test_names_lists_ranges_and_all(host: str, container: str | None, meant: str) -> None:
    assert places(host, container) == meant.split()


@pytest.mark.parametrize(
    ("host", "container", "words"),
    [
        (None, None, "HOST is missing"),
        (None, "all", "HOST is missing"),
        ("a", None, "CT is missing"),
        ("a,b", None, "CT is missing"),
        ("a", "201,202", "no container 202 on a"),
        ("a,b", "201", "no container 201 on b"),
        ("c", "all", "no host 'c'"),
        ("198.51.100.7", "all", "does not know 198.51.100.7"),
        ("all", "999", "means no container"),
        ("all", "1-99999999", "a range of more than"),
        ("a", "201-", "not a container id"),
        ("a", "20x", "not a container id"),
    ],
)
def test_what_means_no_container_is_refused_in_words(
    host: str | None, container: str | None, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        places(host, container)


@pytest.mark.parametrize(
    ("host", "container", "several"),
    [("a", "200", False), (None, None, False), ("all", None, True), ("a,b", "1", True), ("a", "1-2", True)],
)
def test_only_a_list_a_range_or_all_means_several(
    host: str | None, container: str | None, several: bool
) -> None:
    assert is_several(host, container) is several


@given(
    st.dictionaries(
        st.sampled_from("abc"), st.lists(st.integers(100, 130).map(str), unique=True, max_size=5), min_size=1
    )
)
def test_all_is_every_container_of_the_inventory_in_its_order(hosts: dict[str, list[str]]) -> None:
    expected = [f"{host}/{container}" for host, containers in hosts.items() for container in containers]
    if expected:
        assert places("all", None, inventory(**hosts)) == expected
    else:
        with pytest.raises(UsageError):
            places("all", None, inventory(**hosts))
