"""inventory.yaml: what it means, and that every fault is named with its file and line."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import UsageError
from orchestrator.inventory import Inventory, load_inventory, resolve

SHIPPED = Path(__file__).parents[2] / "inventory.yaml"


def load(folder: Path, text: str) -> Inventory:
    path = folder / "inventory.yaml"
    path.write_text(text, encoding="utf-8")
    return load_inventory(path)


def test_the_shipped_inventory_describes_eight_gpus_with_targets_on_0_to_4_and_drafters_on_5_to_7() -> None:
    destination = resolve(load_inventory(SHIPPED), "10.1.2.6", "200", SHIPPED)
    assert destination.host.user == "root"
    assert destination.host.pct == "/usr/sbin/pct"
    assert destination.container.gpus == 8
    assert destination.container.targets == (0, 1, 2, 3, 4)
    assert destination.container.drafters == (5, 6, 7)
    assert destination.container.recipe == "qwen3-8b"
    assert destination.container.torch.version == "2.11.0"
    assert destination.container.torch.backend == "cu128"


def test_a_container_takes_from_the_defaults_what_it_does_not_set(tmp_path: Path) -> None:
    inventory = load(
        tmp_path,
        """
defaults:
  host: {user: operator}
  container: {root: /srv/dflash, torch: {version: 2.12.0, backend: cu130}}
hosts:
  one: {containers: {100: {torch: {backend: cpu}}, 101: }}
""",
    )
    container = resolve(inventory, "one", "100", tmp_path).container
    assert (container.root, container.torch.version, container.torch.backend) == (
        "/srv/dflash",
        "2.12.0",
        "cpu",
    )
    assert resolve(inventory, "one", "101", tmp_path).container.torch.backend == "cu130"
    assert inventory.hosts["one"].user == "operator"


def test_a_host_is_found_by_its_address_too(tmp_path: Path) -> None:
    inventory = load(tmp_path, "hosts: {lab: {address: 192.0.2.7, containers: {200: {}}}}")
    assert resolve(inventory, "192.0.2.7", "200", tmp_path).host_name == "lab"


def test_a_plain_address_that_the_inventory_does_not_know_gets_its_defaults(tmp_path: Path) -> None:
    inventory = load(tmp_path, "defaults: {container: {root: /srv/dflash}}")
    destination = resolve(inventory, "admin@192.0.2.9", "300", tmp_path)
    assert (destination.host.address, destination.host.user) == ("192.0.2.9", "admin")
    assert destination.container.root == "/srv/dflash"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("hosts:\n  a:\n    adress: 1.2.3.4\n", 3, "hosts.a.adress"),
        ("hosts:\n  a:\n    port: many\n", 3, "hosts.a.port"),
        ("hosts:\n  a: {}\n  b: {}\n  a: {}\n", 4, "second time"),
        ("hosts: [a, b]\n", 1, "hosts"),
        ("- a\n", 1, "mapping"),
        ("hosts:\n  a: [b\nc: d\n", 3, "not YAML"),
        ("defaults:\n  container:\n    torch:\n      version: '>=2.11'\n", 4, "exact version"),
        ("hosts:\n  a:\n    containers:\n      200:\n        root: /\n", 5, "folder of its own"),
        ("hosts:\n  a:\n    containers:\n      200:\n        root: /opt/../etc\n", 5, "folder of its own"),
        (
            "hosts:\n  a:\n    containers:\n      200:\n        gpus: 8\n        targets: 0-4\n",
            4,
            "go together",
        ),
        (
            "hosts:\n  a:\n    containers:\n      200:\n        gpus: 4\n        targets: 0-3\n        drafters: 4\n",
            4,
            "GPU 4",
        ),
        (
            "hosts:\n  a:\n    containers:\n      200:\n        targets: x\n        drafters: 1\n",
            5,
            "range such as 0-4",
        ),
    ],
)
def test_a_fault_is_named_with_file_and_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        load(tmp_path, text)
    assert raised.value.message.startswith(f"{tmp_path / 'inventory.yaml'}:{line}: ")
    assert words in raised.value.message
    assert raised.value.exit_status == 2


@pytest.mark.parametrize(
    "text",
    [
        "hosts: &a {local: *a}",
        "x: &a [*a]",
        "hosts: {a: {user: 2026-13-45}}",
        "[" * 3000,
        "hosts: {a: {port: 0x}}",
    ],
)
def test_yaml_that_python_chokes_on_is_a_usage_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError):
        load(tmp_path, text)


def test_a_user_before_a_known_host_changes_the_user_and_nothing_else(tmp_path: Path) -> None:
    inventory = load(tmp_path, "hosts: {lab: {address: 192.0.2.7, port: 2222, containers: {200: {gpus: 4}}}}")
    for host in ("admin@lab", "admin@192.0.2.7"):
        destination = resolve(inventory, host, "200", tmp_path)
        assert (destination.host.user, destination.host.port, destination.container.gpus) == (
            "admin",
            2222,
            4,
        )
        assert "HOST=admin@lab CT=200" in destination.make_arguments


@given(st.text(max_size=300))
def test_any_text_is_an_inventory_or_a_usage_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "inventory.yaml").write_bytes(text.encode("utf-8", errors="surrogatepass"))
    with contextlib.suppress(UsageError):
        load_inventory(folder / "inventory.yaml")


@pytest.mark.parametrize(
    ("host", "container", "words", "known"),
    [
        (None, None, "HOST is missing", "knows 10.1.2.6 (CT 200): add HOST=<name> CT=<id>"),
        ("10.1.2.6", None, "CT is missing", "knows 10.1.2.6 (CT 200): add CT=<id>"),
        ("nowhere", "200", "no host 'nowhere'", "It knows 10.1.2.6 (CT 200)."),
        ("10.1.2.6", "201", "no container 201", "It knows: 200."),
        ("10.1.2.6", "two", "not a container id", "from 100: CT=200"),
        ("10.1.2.6", "-1", "not a container id", "from 100: CT=200"),
    ],
)
def test_an_unknown_place_is_refused_with_what_is_known(
    host: str | None, container: str | None, words: str, known: str
) -> None:
    with pytest.raises(UsageError) as raised:
        resolve(load_inventory(SHIPPED), host, container, SHIPPED)
    assert words in raised.value.message
    assert known in raised.value.hint


def test_a_missing_inventory_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no inventory at"):
        load_inventory(tmp_path / "none.yaml")


SEVERAL = """defaults:
  host: {port: many}
  container: {gpus: -1}
hosts:
  a:
    adress: 192.0.2.1
    containers:
      abc: {}
      200: {gpus: x}
      201: {}
  b: {user: 3, port: 99999999}
  b: {}
"""


def test_all_faults_are_named_at_once_in_the_order_of_their_lines(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        load(tmp_path, SEVERAL)
    lines = [line.removeprefix(f"{tmp_path}/inventory.yaml:") for line in raised.value.message.splitlines()]
    assert lines == [
        "2: defaults.host.port: a whole number is needed.",
        "3: defaults.container.gpus: the number is too small.",
        "6: hosts.a.adress: there is no such key.",
        "8: hosts.a.containers.abc: not a container's id: Proxmox numbers them from 100.",
        "9: hosts.a.containers.200.gpus: a whole number is needed.",
        "12: 'b' stands here a second time.",
    ]


def test_a_hopeless_file_is_not_told_without_end(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        load(tmp_path, "hosts:\n  a:\n" + "".join(f"    key{number}: 1\n" for number in range(50)))
    assert len(raised.value.message.splitlines()) == 20
    assert raised.value.hint == "And 30 more faults."


def test_an_unknown_key_is_told_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        load(tmp_path, "hosts: {a: {containers: {200: {torch: {verson: 2.11.0}}}}}")
    assert raised.value.hint == (
        "Known keys of hosts.a.containers.200.torch: version, backend, index_url, cuda, git."
    )


def test_aliases_and_merges_bring_values_into_other_places(tmp_path: Path) -> None:
    inventory = load(
        tmp_path,
        """
hosts:
  a: &a
    user: operator
    containers: {200: &big {gpus: 8, recipe: smollm2}, 201: *big, 202: {<<: *big, gpus: 4}}
  b: {<<: *a, user: root}
  c: {<<: [{port: 2222, user: first}, {user: second, sudo: true}]}
""",
    )
    a, b, c = (inventory.hosts[name] for name in "abc")
    assert [(at.gpus, at.recipe) for at in a.containers.values()] == [
        (8, "smollm2"),
        (8, "smollm2"),
        (4, "smollm2"),
    ]
    assert (b.user, b.containers) == ("root", a.containers)
    assert (c.user, c.port, c.sudo) == ("first", 2222, True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hosts:\n  a: &a {prot: 1}\n  b: *a\n  c: {<<: *a}\n", "2: hosts.a.prot: there is no such key."),
        ("hosts:\n  a: {<<: 5}\n", "2: << takes a mapping, or a list of them."),
        ("hosts:\n  a:\n    <<: {port: 1}\n    <<: {}\n", "4: '<<' stands here a second time."),
        ("hosts: &a\n  local: *a\n", "1: nested without end (an alias of itself)."),
        ("hosts:\n  a: {user: 2026-13-45}\n", "2: '2026-13-45' is not a valid value."),
        ("hosts:\n  ? [a]\n  : {}\n", "2: a key must be text."),
        ('hosts:\n  "\\ud800": {}\n', "2: '\\ud800' is not a valid value."),
        ("hosts:\n  a: {port: '22'}\n", "2: hosts.a.port: a whole number is needed."),
        ("hosts:\n  a: {sudo: 1}\n", "2: hosts.a.sudo: true or false is needed."),
        (
            "hosts:\n  a: {connect_timeout_s: .inf}\n",
            "2: hosts.a.connect_timeout_s: a finite number is needed.",
        ),
    ],
)
def test_one_fault_is_told_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        load(tmp_path, text)
    assert raised.value.message == f"{tmp_path / 'inventory.yaml'}:{says}"


def test_a_few_lines_of_aliases_cannot_mean_endlessly_many(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 40)]
    lines += ["m0: &m0 {x: *a39}"]
    lines += [f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 8)}]}}" for n in range(1, 40)]
    with pytest.raises(UsageError, match="And 60 more faults"):
        load(tmp_path, "\n".join(lines))


@pytest.mark.parametrize(
    "key", ["abc", "99", "0", "-200", "1000000000", "200.5", "'20 0'", "true", "null", "'\u0662\u0660\u0660'"]
)
def test_a_key_that_is_no_container_of_proxmox_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(UsageError, match=r":[23]: hosts\.a\.containers\..*: not a container's id"):
        load(tmp_path, f"hosts:\n  a: {{containers: {{\n    {key}: {{}} }} }}\n")


def test_a_number_that_yaml_reads_as_another_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r":2: .*octal"):
        load(tmp_path, "hosts: {a: {containers: {\n 0200: {} }}}")


@pytest.mark.parametrize("key", ["100", "200", "999999999", "'200'"])
def test_a_key_that_is_one_is_taken_as_a_number_or_as_text(tmp_path: Path, key: str) -> None:
    inventory = load(tmp_path, f"hosts: {{a: {{containers: {{{key}: {{}}}}}}}}")
    assert resolve(inventory, "a", key.strip("'"), tmp_path).container_id == key.strip("'")


@pytest.mark.parametrize("container", ["99", "0200", "abc", "\u0662\u0660\u0660"])
def test_what_proxmox_cannot_number_is_no_ct(container: str) -> None:
    with pytest.raises(UsageError, match="is not a container id") as raised:
        resolve(load_inventory(SHIPPED), "10.1.2.6", container, SHIPPED)
    assert "from 100" in raised.value.hint
