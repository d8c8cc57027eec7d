"""The embedded node, once a test process: a real SSH server, a real pct, containers 200 (running) and 201 (stopped)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.connection import Connection
from orchestrator.container import Container
from orchestrator.inventory import Destination, load_inventory, resolve
from orchestrator.localnode import node
from orchestrator.localnode.node import NodeInfo


@pytest.fixture(scope="session")
def local_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeInfo]:
    state = tmp_path_factory.mktemp("node")
    try:
        yield node.start(state)
    finally:
        node.stop(state)


@pytest.fixture(scope="session")
def destination(local_node: NodeInfo) -> Destination:
    return resolve(load_inventory(local_node.inventory), "local", "200", local_node.inventory)


@pytest.fixture
def connection(destination: Destination) -> Iterator[Connection]:
    with Connection("local", destination.host) as opened:
        yield opened


@pytest.fixture
def container(connection: Connection, destination: Destination) -> Container:
    return Container(connection, destination)


@pytest.fixture
def folder(container: Container, request: pytest.FixtureRequest) -> Path:
    """A fresh folder inside the container, as a path that is the same on both sides of the embedded node."""
    path = Path(container.settings.root) / "tests" / request.node.name.replace("/", "_")[:60]
    path.mkdir(parents=True, exist_ok=True)
    return path
