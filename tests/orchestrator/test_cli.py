"""The commands as a person types them: bad input gives one paragraph with the next step and the right exit status."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncssh
import pytest
import yaml

from orchestrator.localnode.node import NodeInfo

REPOSITORY = Path(__file__).parents[2]


def orchestrator(
    *arguments: str,
    inventory: Path | None = None,
    home: Path | None = None,
    timeout_s: float = 60,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DFLASH_")}
    if inventory is not None:
        environment["DFLASH_INVENTORY"] = str(inventory)
    if home is not None:
        environment |= {"HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
    return subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", *arguments],
        cwd=REPOSITORY,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def assert_one_paragraph(done: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1
    error = done.stderr[done.stderr.index("error:") :]
    assert len(error.strip().splitlines()) <= 3, error
    for word in words:
        assert word in error


@pytest.fixture
def inventory(local_node: NodeInfo, tmp_path: Path) -> Path:
    """A copy of the node's inventory to change."""
    path = tmp_path / "inventory.yaml"
    shutil.copy(local_node.inventory, path)
    return path


def change(inventory: Path, **host: Any) -> None:
    content = yaml.safe_load(inventory.read_text())
    content["hosts"]["local"] |= host
    inventory.write_text(yaml.safe_dump(content))


def test_host_without_ct_names_the_containers(inventory: Path) -> None:
    assert_one_paragraph(
        orchestrator("status", "--host", "local", inventory=inventory), 2, "CT is missing", "200"
    )


def test_no_host_at_all_names_the_hosts() -> None:
    assert_one_paragraph(orchestrator("train"), 2, "HOST is missing", "10.1.2.6 (CT 200)")


ONE_CONTAINER = (
    "venv",
    "warmup",
    "train",
    "stop",
    "fetch",
    "evaluate",
    "estimate",
    "probe",
    "prune",
    "locks",
)


@pytest.mark.parametrize(
    ("command", "place", "named"),
    [
        *((command, ("--host", "all"), "HOST=all") for command in ONE_CONTAINER),
        ("logs", ("--host", "local", "--ct", "200,201"), "HOST=local CT=200,201"),
        ("logs", ("--host", "local", "--ct", "all"), "HOST=local CT=all"),
    ],
)
def test_a_command_that_works_on_one_container_says_so_where_several_are_named(
    inventory: Path, command: str, place: tuple[str, ...], named: str
) -> None:
    done = orchestrator(command, *place, inventory=inventory)
    assert_one_paragraph(
        done,
        2,
        f"{named} may mean several containers",
        "works on one",
        "local (CT 200",
        "deploy, status, doctor",
    )


def test_an_unknown_host_names_those_that_are_known() -> None:
    assert_one_paragraph(
        orchestrator("deploy", "--host", "elsewhere", "--ct", "200"), 2, "no host 'elsewhere'", "10.1.2.6"
    )


def test_an_unknown_container_of_a_known_host_is_refused() -> None:
    assert_one_paragraph(
        orchestrator("deploy", "--host", "10.1.2.6", "--ct", "201"), 2, "no container 201", "200"
    )


def test_a_malformed_inventory_is_named_with_its_line(inventory: Path) -> None:
    inventory.write_text("hosts:\n  local:\n    adress: 127.0.0.1\n")
    done = orchestrator("status", "--host", "local", "--ct", "200", inventory=inventory)
    assert_one_paragraph(done, 2, f"{inventory}:3:", "adress")


def test_an_unreachable_host_is_a_transport_error(inventory: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        change(inventory, port=closed.getsockname()[1])
    done = orchestrator("status", "--host", "local", "--ct", "200", inventory=inventory)
    assert_one_paragraph(done, 3, "no SSH connection", "Connection refused")


def test_the_name_of_the_shipped_host_can_be_given_another_address(
    inventory: Path, local_node: NodeInfo
) -> None:
    content = yaml.safe_load(inventory.read_text())
    content["hosts"] = {"10.1.2.6": content["hosts"]["local"]}
    inventory.write_text(yaml.safe_dump(content))
    assert orchestrator("deploy", "--host", "10.1.2.6", "--ct", "200", inventory=inventory).returncode == 0


def test_an_unknown_host_key_is_refused(inventory: Path, tmp_path: Path) -> None:
    (tmp_path / "known_hosts").touch()
    change(inventory, known_hosts=str(tmp_path / "known_hosts"))
    done = orchestrator("status", "--host", "local", "--ct", "200", inventory=inventory)
    assert_one_paragraph(done, 3, "is not known", "SHA256:", "ssh-keyscan")


def test_a_changed_host_key_is_refused(inventory: Path, tmp_path: Path, local_node: NodeInfo) -> None:
    key = asyncssh.generate_private_key("ssh-ed25519").export_public_key("openssh").decode()
    (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{local_node.port} {key}")
    change(inventory, known_hosts=str(tmp_path / "known_hosts"))
    done = orchestrator("deploy", "--host", "local", "--ct", "200", inventory=inventory)
    assert_one_paragraph(done, 3, "has CHANGED", "ssh-keygen")


def test_a_wrong_key_is_refused(inventory: Path, tmp_path: Path) -> None:
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(tmp_path / "key"))
    change(inventory, identity_file=str(tmp_path / "key"))
    done = orchestrator("status", "--host", "local", "--ct", "200", inventory=inventory)
    assert_one_paragraph(done, 3, "accepts none of your keys", "ssh-copy-id")


def test_a_missing_pct_is_named(inventory: Path) -> None:
    change(inventory, pct="/usr/sbin/no-such-pct")
    done = orchestrator("deploy", "--host", "local", "--ct", "200", inventory=inventory)
    assert_one_paragraph(done, 3, "has no /usr/sbin/no-such-pct", "Proxmox")


def test_a_stopped_container_is_named_with_the_command_that_starts_it(
    inventory: Path, local_node: NodeInfo
) -> None:
    subprocess.run([str(local_node.pct), "stop", "200"], check=True, timeout=20)
    try:
        done = orchestrator("deploy", "--host", "local", "--ct", "200", inventory=inventory)
    finally:
        subprocess.run([str(local_node.pct), "start", "200"], check=True, timeout=20)
    assert_one_paragraph(done, 3, "is stopped", "pct start 200")


def test_a_recipe_that_is_not_there_names_those_that_are(inventory: Path) -> None:
    done = orchestrator("warmup", "--host", "local", "--ct", "200", "--recipe", "qwen9", inventory=inventory)
    assert_one_paragraph(done, 2, "No recipe qwen9", "tiny-cpu")


def test_an_override_that_fits_no_key_is_refused(inventory: Path) -> None:
    done = orchestrator(
        "train", "--host", "local", "--ct", "200", "--set", "train.stepz=3", inventory=inventory
    )
    assert_one_paragraph(done, 2, "train.stepz")


@pytest.mark.parametrize("since", ["yesterday", "-5m", "10 minutes"])
def test_a_time_span_that_is_none_is_refused(inventory: Path, since: str) -> None:
    done = orchestrator("logs", f"--since={since}", "--host", "local", "--ct", "200", inventory=inventory)
    assert_one_paragraph(done, 2, "not a time span")


def test_help_is_shown_without_a_command() -> None:
    done = orchestrator()
    assert "deploy" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_output_that_cannot_be_written_is_an_error_in_words(inventory: Path) -> None:
    assert orchestrator("deploy", "--host", "local", "--ct", "200", inventory=inventory).returncode == 0
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator.cli", "status", "--json", "--host", "local", "--ct", "200"],
            env={**os.environ, "DFLASH_INVENTORY": str(inventory)},
            cwd=REPOSITORY,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert_one_paragraph(done, 1, "The desk could not go on", "No space left on device")


def test_a_switch_of_make_that_says_no_is_off() -> None:
    def command(*arguments: str) -> str:
        return subprocess.run(
            ["make", "--no-print-directory", "--dry-run", "--old-file=.venv/.desk", "train", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "DETACH": "1", "WHEELHOUSE": "1"},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout

    assert "--detach" in command("DETACH=1")
    assert "--detach" not in command("DETACH=0")
    assert "--wheelhouse" not in command("DETACH=1")
