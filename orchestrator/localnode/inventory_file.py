"""The inventory of an embedded node, in the format that every host's has."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from orchestrator.localnode import layout
from orchestrator.localnode.desk_pip import TORCH_VERSION, desk_index, desk_torch
from orchestrator.settings import DEFAULT_CONTAINER_PATH, IndexSettings, TorchPin


@dataclass(frozen=True)
class ContainerPlan:
    """What a container of the node is for.

    ``python``: the interpreter its venvs are made from; None for the desk's own. ``torch_version``: the pin; where
    its build comes from follows from the desk's pip settings.
    """

    recipe: str = "tiny-cpu"
    torch_version: str = TORCH_VERSION
    python: str | None = None
    gpus: int = 0

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode("utf-8")

    @classmethod
    def of(cls, state: Path, container_id: str) -> ContainerPlan:
        """The plan that the container was made with."""
        folder = Path(layout.container_folder(str(state), container_id))
        return cls(**json.loads((folder / layout.CONTAINER_INVENTORY).read_bytes()))


def inventory_text(
    state: Path, *, address: str, port: int, user: str, default_python: str, environment: Mapping[str, str]
) -> str:
    """The whole inventory.yaml of the node in ``state``, with all of its containers."""
    index = desk_index(environment)
    plans = {name: ContainerPlan.of(state, name) for name in layout.container_ids(str(state))}
    plans = {name: replace(plan, python=plan.python or default_python) for name, plan in plans.items()}
    # Asked once for all containers of one kind: it looks into the desk's indexes.
    torch_of = functools.cache(
        lambda version, python: desk_torch(environment, version=version, python=python)
    )
    host = {
        "address": address,
        "port": port,
        "user": user,
        "identity_file": str(state / layout.CLIENT_KEY),
        "known_hosts": str(state / layout.KNOWN_HOSTS),
        "pct": str(state / layout.PCT),
        "sudo": False,
        "containers": {
            name: _container(state, name, plan, index, torch_of(plan.torch_version, str(plan.python)))
            for name, plan in plans.items()
        },
    }
    header = "# Written by the embedded node each time it starts; changes here are lost.\n"
    return header + yaml.safe_dump({"hosts": {"local": host}}, sort_keys=False, allow_unicode=True)


def _container(
    state: Path, container_id: str, plan: ContainerPlan, index: IndexSettings, torch: TorchPin
) -> dict[str, Any]:
    rootfs = Path(layout.container_folder(str(state), container_id), layout.ROOTFS)
    return {
        "root": f"{rootfs}/opt/dflash",
        "home": f"{rootfs}/root",
        "python": plan.python,
        "path": list(DEFAULT_CONTAINER_PATH),
        "recipe": plan.recipe,
        "gpus": plan.gpus,
        "torch": {"version": torch.version, "backend": torch.backend},
        "index": asdict(index),
    }
