"""The bed: real OpenSSH, real LXC, real systemd, on this machine alone.

``python -m tests.lxc.bed up [FOLDER]`` leaves one running and prints its inventory; ``... down [FOLDER]`` removes it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.lxc import machine, rootfs, sshd
from tests.lxc.lxc import Lxc
from tests.lxc.sshd import Sshd

HOST = "bed"
PRIVILEGED = "200"
UNPRIVILEGED = "201"
DEFAULT_FOLDER = Path(tempfile.gettempdir()) / "dflash-bed"
_FACTS = "bed.json"


@dataclass(frozen=True)
class Bed:
    """A running bed in ``folder``. Made by :meth:`up`, removed by :meth:`down`."""

    folder: Path
    sshd: Sshd
    containers: dict[str, Lxc]

    @classmethod
    def up(cls, folder: Path = DEFAULT_FOLDER, containers: Sequence[str] = (PRIVILEGED,)) -> Bed:
        """Make and start everything in ``folder``, which must not be there: seconds once the base is cached.

        ``containers`` are ids, as for :meth:`add`. Raises RuntimeError that says what went wrong; nothing is left then.
        """
        problem = machine.missing() or machine.cannot()
        if problem:
            raise RuntimeError(problem)
        rootfs.base()
        folder.mkdir(parents=True)
        # An unprivileged container's root must reach its root file system.
        folder.chmod(0o755)
        bed = cls(folder, Sshd(folder / "ssh", sshd.free_port()), {})
        try:
            (folder / "sbin").mkdir()
            shutil.copy(Path(__file__).with_name("pct"), bed.pct)
            bed.sshd.start()
            for name in containers:
                bed.add(name)
        except BaseException:
            bed.down()
            raise
        return bed

    def add(self, container_id: str) -> Lxc:
        """Make and start one more container; ``201`` is unprivileged."""
        container = self.containers[container_id] = Lxc(self.folder / "lxc", container_id)
        container.make(unprivileged=container_id == UNPRIVILEGED)
        container.start()
        self.write_inventory(self.inventory)
        facts = {"port": self.sshd.port, "containers": list(self.containers)}
        (self.folder / _FACTS).write_text(json.dumps(facts))
        return container

    @classmethod
    def at(cls, folder: Path = DEFAULT_FOLDER) -> Bed:
        """The bed that somebody left running in ``folder``."""
        facts = json.loads((folder / _FACTS).read_text())
        found = {name: Lxc(folder / "lxc", name) for name in facts["containers"]}
        return cls(folder, Sshd(folder / "ssh", int(facts["port"])), found)

    @property
    def pct(self) -> Path:
        return self.folder / "sbin" / "pct"

    @property
    def inventory(self) -> Path:
        """The inventory of the whole bed: host ``bed`` and each container with its defaults."""
        return self.folder / "inventory.yaml"

    def write_inventory(
        self, path: Path, *, host: Mapping[str, Any] | None = None, container: Mapping[str, Any] | None = None
    ) -> Path:
        """Write an inventory of the bed to ``path``; ``host`` and ``container`` replace or add settings of each."""
        settings: dict[str, Any] = {
            "address": sshd.ADDRESS,
            "port": self.sshd.port,
            "user": "root",
            "identity_file": str(self.sshd.client_key),
            "known_hosts": str(self.sshd.known_hosts),
            "pct": str(self.pct),
            **(host or {}),
        }
        containers = {name: {"recipe": "tiny-cpu", **(container or {})} for name in self.containers}
        hosts = {HOST: {name: value for name, value in settings.items() if value is not None}}
        hosts[HOST]["containers"] = containers
        path.write_text(yaml.safe_dump({"hosts": hosts}, sort_keys=False))
        return path

    def down(self) -> None:
        """End the containers and the server, and remove the folder. Nothing of the bed is left."""
        for container in self.containers.values():
            if container.folder.exists():
                container.kill()
        self.sshd.stop()
        shutil.rmtree(self.folder, ignore_errors=False)


def main(arguments: list[str]) -> int:
    """``up [FOLDER]`` or ``down [FOLDER]``."""
    if not arguments or arguments[0] not in ("up", "down") or len(arguments) > 2:
        sys.stderr.write("usage: python -m tests.lxc.bed up|down [FOLDER]\n")
        return 2
    folder = Path(arguments[1]).absolute() if len(arguments) == 2 else DEFAULT_FOLDER
    if arguments[0] == "down":
        if folder.exists():
            Bed.at(folder).down()
        return 0
    bed = Bed.at(folder) if (folder / _FACTS).exists() else Bed.up(folder)
    sys.stdout.write(f"{bed.inventory}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
