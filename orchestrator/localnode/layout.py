"""Where things lie in a node's state folder. Plain strings: ``pct`` cannot afford to import pathlib.

::

    client_key  known_hosts  inventory.yaml      what the controller is given
    node.lock                                    held by start and stop; marks the folder as a node's
    etc/        host_key  authorized_keys        the SSH server's
    bin/pct     lib/container-init               launchers
    home/                                        the home folder of SSH sessions
    run/        server.json                      the running server
    log/        server.log
    containers/ID/  config  rootfs/  inventory.json  lock  init.sock  init.log
"""

from __future__ import annotations

import os

from orchestrator.container_id import is_container_id

DEFAULT_STATE = ".dflash/node"
CLIENT_KEY = "client_key"
KNOWN_HOSTS = "known_hosts"
INVENTORY = "inventory.yaml"
HOST_KEY = "etc/host_key"
AUTHORIZED_KEYS = "etc/authorized_keys"
PCT = "bin/pct"
CONTAINER_INIT = "lib/container-init"
HOME = "home"
SERVER_RECORD = "run/server.json"
NODE_LOCK = "node.lock"
SERVER_LOG = "log/server.log"
CONTAINERS = "containers"

CONFIG = "config"
ROOTFS = "rootfs"
CONTAINER_LOCK = "lock"
INIT_SOCKET = "init.sock"
INIT_LOG = "init.log"
CONTAINER_INVENTORY = "inventory.json"


def state_of(pct: str, known_hosts: str | None) -> str | None:
    """The state folder of the node that an inventory with these settings was written by; None for a real host."""
    state = os.path.dirname(known_hosts or "")
    if not state or pct != os.path.join(state, PCT) or not os.path.exists(os.path.join(state, NODE_LOCK)):
        return None
    return state


def container_folder(state: str, container_id: str) -> str:
    return os.path.join(state, CONTAINERS, container_id)


def container_ids(state: str) -> list[str]:
    """The ids of all containers, in numerical order."""
    try:
        names = os.listdir(os.path.join(state, CONTAINERS))
    except FileNotFoundError:
        return []
    known = [name for name in names if os.path.isfile(os.path.join(container_folder(state, name), CONFIG))]
    return sorted((name for name in known if is_container_id(name)), key=int)
