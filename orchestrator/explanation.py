"""What it means that a command did not do its work in a container: said by its own words and by what ``pct`` tells.

An exit status alone says nothing: ``pct``'s own failures share theirs with commands, and ``pct status`` exits 0 for a
stopped container.
"""

from __future__ import annotations

import re

from orchestrator.command import Completed
from orchestrator.errors import OrchestratorError, RefusedError, RemoteError, TransportError
from orchestrator.inventory import Destination


def explanation(destination: Destination, done: Completed, what: str, status: Completed) -> OrchestratorError:
    """The error for the command ``done``, after which ``what`` is the matter and ``pct status`` ended as ``status``."""
    ct, host = destination.container_id, destination.host_name
    reply = status.stdout.decode("utf-8", errors="replace").strip()
    complaint = status.stderr_text()
    if "status: running" in reply:
        detail = _cause(done.stderr_text()) or f"exit status {done.exit_status}"
        # The second is how tar says it when a write was cut short.
        if re.search(r"No space left on device|: Wrote only \d+ of \d+ bytes", done.stderr_text()):
            return RemoteError(
                f"{destination}: {what}: no space left on its disk.", "Free some (make prune), or grow it."
            )
        if "Permission denied" in done.stderr_text():
            root = destination.container.root
            return RemoteError(
                f"{destination}: {what}: {detail}.",
                f"Does {root} belong to the container's root? In an unprivileged container, what the host made "
                f"belongs to nobody: on the host, chown -R 100000:100000 it (or remove it, and deploy makes it).",
            )
        return RemoteError(f"{destination}: {what}: {detail}.")
    if "status: " in reply:
        state = reply.split("status: ", 1)[1].split()[0]
        return TransportError(f"{destination} is {state}.", f"Start it on the host: pct start {ct}")
    if status.exit_status == 127 or "not found" in complaint or "No such file" in complaint:
        return TransportError(
            f"{host} has no {destination.host.pct}.",
            "Is it a Proxmox host? Set `pct:` in the inventory when it is elsewhere.",
        )
    if "does not exist" in complaint:
        return TransportError(
            f"{host} has no container {ct}.",
            "`pct list` on the host shows those it has; correct CT= or the inventory.",
        )
    if "password is required" in complaint or "please run as root" in complaint:
        return RefusedError(
            f"{host}: {destination.host.user} may not run pct ({_last_line(complaint)}).",
            "Log in as root, or allow `NOPASSWD: /usr/sbin/pct` for that user in sudoers.",
        )
    return TransportError(f"{destination}: {what}, and pct says: {_last_line(complaint) or 'nothing'}.")


def _cause(text: str) -> str:
    """The line of a command's complaints that says why: tar tells it first, and ends by saying that it failed."""
    of_tar = [line.strip() for line in text.splitlines() if line.startswith("tar: ")]
    return of_tar[0].rstrip(".") if of_tar else _last_line(text)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else ""
