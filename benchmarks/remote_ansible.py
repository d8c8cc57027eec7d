"""The same work by Ansible's ``community.proxmox.proxmox_pct_remote``, in a venv that nothing else uses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import uv
import yaml

from orchestrator.inventory import Destination

REQUIREMENTS = Path(__file__).with_name("requirements-remote.txt")
FILES = 40
FILE_BYTES = 8192
_PLUGIN = "ansible_collections/community/proxmox/plugins/connection/proxmox_pct_remote.py"
_PCT = "/usr/sbin/pct"


@dataclass(frozen=True)
class Ansible:
    """``ansible-playbook`` with an inventory of one container, and the playbooks of the benchmark in ``folder``."""

    program: Path
    folder: Path

    def play(self, name: str, *, timeout_s: float = 900.0) -> float:
        """Run a playbook of :func:`prepare` and return its seconds, from the start of the program to its end."""
        environment = {
            **os.environ,
            "ANSIBLE_HOME": str(self.folder / "home"),
            "ANSIBLE_NOCOWS": "1",
            "ANSIBLE_LOCALHOST_WARNING": "0",
            "ANSIBLE_CONNECTION_PLUGINS": str(self.folder / "plugins"),
            "ANSIBLE_PARAMIKO_HOST_KEY_AUTO_ADD": "1",
            "ANSIBLE_PARAMIKO_RECORD_HOST_KEYS": "0",
            "ANSIBLE_PARAMIKO_LOOK_FOR_KEYS": "0",
            "ANSIBLE_PARAMIKO_PTY": "0",
        }
        began = time.monotonic()
        done = subprocess.run(
            [self.program, "-i", "inventory.yaml", f"{name}.yaml"],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        seconds = time.monotonic() - began
        if done.returncode != 0:
            raise RuntimeError(f"ansible-playbook {name} failed:\n{done.stdout}{done.stderr}")
        return seconds


def install(folder: Path) -> Path:
    """A venv with the pinned Ansible in ``folder``; returns its ``bin``."""
    if not (folder / "bin" / "ansible-playbook").exists():
        uv_program = uv.find_uv_bin()
        subprocess.run([uv_program, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
        python = str(folder / "bin" / "python")
        subprocess.run(
            [uv_program, "pip", "install", "--quiet", "--python", python, "-r", str(REQUIREMENTS)], check=True
        )
    return folder / "bin"


def prepare(bin_folder: Path, folder: Path, destination: Destination) -> Ansible:
    """Write inventory, playbooks and files for ``destination`` to ``folder``.

    The connection is the collection's own file; where pct is not at ``/usr/sbin/pct``, that one path in it is changed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "plugins").mkdir(parents=True)
    [original] = bin_folder.parent.glob(f"lib/python*/site-packages/{_PLUGIN}")
    text = original.read_text(encoding="utf-8")
    assert text.count(f"'{_PCT}', 'exec'") == 1
    plugin = text.replace(f"'{_PCT}', 'exec'", f"'{destination.host.pct}', 'exec'")
    (folder / "plugins" / "proxmox_pct_here.py").write_text(plugin, encoding="utf-8")
    tree = folder / "tree"
    tree.mkdir()
    for number in range(FILES):
        (tree / f"module_{number:02}.py").write_bytes(f"# {number}\n".encode() * (FILE_BYTES // 5))
    (folder / "script.py").write_text("#!/usr/bin/env python3\nprint('done')\n")
    target = f"{destination.container.root}/ansible-tree"
    tasks = {
        "deploy": [{"copy": {"src": f"{tree}/", "dest": f"{target}/", "mode": "preserve"}}],
        # Kinder to Ansible than its users mostly are: one archive instead of one file after the other.
        "archive": [
            {"file": {"path": f"{target}-archive", "state": "directory"}},
            {"unarchive": {"src": str(folder / "tree.tar.gz"), "dest": f"{target}-archive"}},
        ],
        "script": [
            {"script": {"cmd": str(folder / "script.py"), "executable": destination.container.python}}
        ],
        "clean": [{"file": {"path": path, "state": "absent"}} for path in (target, f"{target}-archive")],
    }
    shutil.make_archive(str(folder / "tree"), "gztar", tree)
    for name, steps in tasks.items():
        play = [{"hosts": "all", "gather_facts": False, "tasks": steps}]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(play, sort_keys=False))
    host = destination.host
    variables = {
        "ansible_connection": "proxmox_pct_here",
        "ansible_host": host.address or destination.host_name,
        "ansible_port": host.port or 22,
        "ansible_user": host.user,
        "ansible_private_key_file": host.identity_file,
        "proxmox_vmid": int(destination.container_id),
        "ansible_python_interpreter": destination.container.python,
        "ansible_remote_tmp": f"{destination.container.root}/ansible-tmp",
    }
    inventory = {"all": {"hosts": {"container": {k: v for k, v in variables.items() if v is not None}}}}
    (folder / "inventory.yaml").write_text(yaml.safe_dump(inventory, sort_keys=False))
    return Ansible(bin_folder / "ansible-playbook", folder)
