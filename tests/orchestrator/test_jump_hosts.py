"""Jump hosts of ssh_config: each with keys of its own, the same deadlines, and its own name where it is in the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from orchestrator import login
from orchestrator.connection import Connection
from orchestrator.errors import TransportError
from orchestrator.hostkeys import hops
from orchestrator.inventory import Destination
from orchestrator.liveness import WatchedTransport
from orchestrator.settings import HostSettings


@pytest.fixture
def inside(destination: Destination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostSettings:
    """A host that ssh_config reaches by way of the embedded node, which lets nobody through."""
    for name in ("gate", "inside"):
        asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(tmp_path / name))
    gate = destination.host
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(
        f"Host gate\n HostName 127.0.0.1\n Port {gate.port}\n User {gate.user}\n IdentityFile {tmp_path}/gate\n"
        f"Host inside\n HostName 127.0.0.1\n Port 9\n ProxyJump gate\n IdentityFile {tmp_path}/inside\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return replace(gate, address="inside", port=None, identity_file=None, connect_timeout_s=3)


def test_every_hop_has_the_deadlines_and_the_keys_of_its_own(inside: HostSettings, tmp_path: Path) -> None:
    host, gate = hops(login._configured("lab", inside))
    for hop, key in ((host, "inside"), (gate, "gate")):
        assert hop.connect_timeout == 3
        assert hop.connect_kwargs == {
            "banner_timeout": 3,
            "auth_timeout": 3,
            "channel_timeout": 3,
            "transport_factory": WatchedTransport,
            "key_filename": [str(tmp_path / key)],
        }


def test_a_jump_host_that_is_not_known_or_takes_no_key_is_the_one_that_is_told_of(
    inside: HostSettings, destination: Destination, tmp_path: Path
) -> None:
    port = destination.host.port
    with pytest.raises(TransportError, match=f"127.0.0.1:{port} accepts none of your keys") as raised:
        Connection("lab", inside).run(["true"])
    assert f"ssh-copy-id -p {port}" in raised.value.hint
    (tmp_path / "nobody").touch()
    with pytest.raises(TransportError, match=rf"the host key of \[127.0.0.1\]:{port} is not known") as raised:
        Connection("lab", replace(inside, known_hosts=str(tmp_path / "nobody"))).run(["true"])
    assert f"ssh-keyscan -p {port} 127.0.0.1" in raised.value.hint


def test_a_jump_host_that_lets_nobody_through_is_told_with_both_names(
    inside: HostSettings, destination: Destination, tmp_path: Path
) -> None:
    (tmp_path / "gate").write_bytes(Path(str(destination.host.identity_file)).read_bytes())
    with pytest.raises(TransportError) as raised:
        Connection("lab", inside).run(["true"])
    assert f"@127.0.0.1:9 by way of {destination.host.user}@127.0.0.1" in raised.value.message
