"""inventory.yaml: which hosts and containers there are, and what is pinned on them.

Every fault is named with file and line, all of a file at once. A value that a container does not set comes from
``defaults``, and from the settings' own default after that.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.container_id import is_container_id
from orchestrator.errors import UsageError
from orchestrator.settings import CheckedContainer, ContainerSettings, HostSettings
from payload.errors import PayloadError
from payload.located import Fault, Located
from payload.yaml_binding import bind
from payload.yaml_reading import read_yaml

DEFAULT_INVENTORY = Path("inventory.yaml")


@dataclass(frozen=True)
class Defaults:
    """What every host and container starts from."""

    host: HostSettings = field(default_factory=HostSettings)
    container: CheckedContainer = field(default_factory=ContainerSettings)


@dataclass(frozen=True)
class Inventory:
    """``defaults`` come first: a fault that hosts take over from there is told there, once."""

    defaults: Defaults = field(default_factory=Defaults)
    hosts: dict[str, HostSettings] = field(default_factory=dict)


@dataclass(frozen=True)
class Destination:
    """One container on one host: what a step works on."""

    host_name: str
    container_id: str
    host: HostSettings
    container: ContainerSettings
    inventory: Path

    @property
    def make_arguments(self) -> str:
        """What to add to a make target to mean this container, for the commands that messages suggest."""
        path = from_here(self.inventory)
        inventory = "" if path == DEFAULT_INVENTORY else f" INVENTORY={path}"
        return f"HOST={self.host_name} CT={self.container_id}{inventory}"

    def __str__(self) -> str:
        return f"container {self.container_id} on {self.host_name}"


def from_here(path: Path) -> Path:
    """``path`` as one would type it in the working folder."""
    return path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path


def load_inventory(path: Path) -> Inventory:
    """Read and validate an inventory.

    Raises :class:`UsageError` with ``file:line`` of every fault: text that is not YAML, a key that is unknown or
    written twice, and a value that cannot be.
    """
    faults: list[Fault] = []
    try:
        located = read_yaml(path, faults, aliases=True)
        if not isinstance(located.value, dict):
            kind = type(located.value).__name__
            raise UsageError(f"{located.where}: an inventory is a mapping with `hosts:`, not a {kind}.")
        return bind(Inventory, _with_defaults(located), faults)
    except PayloadError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise UsageError(
                f"There is no inventory at {path}.",
                "Name one with INVENTORY=<file>, or copy the shipped inventory.yaml.",
            ) from None
        raise UsageError(error.message, error.hint) from None


def resolve(inventory: Inventory, host: str | None, container: str | None, source: Path) -> Destination:
    """The container that ``HOST`` and ``CT`` mean.

    ``host`` is a name of the inventory, the address of one, or an address that it does not know
    (``[user@]address``), for which the inventory's defaults hold. Raises :class:`UsageError` that lists what is known.
    """
    known = known_destinations(inventory)
    if not host:
        raise UsageError("HOST is missing.", f"{source} knows {known}: add HOST=<name> CT=<id>.")
    if not container:
        raise UsageError(
            f"CT is missing: which container on {host}?", f"{source} knows {known}: add CT=<id>."
        )
    if not is_container_id(container):
        raise UsageError(
            f"CT={container} is not a container id.", "Proxmox numbers containers from 100: CT=200."
        )
    user, _, address = host.rpartition("@")
    name = _host_name(inventory, address)
    if name is None:
        if not _is_ip_address(address):
            raise UsageError(
                f"{source} has no host {host!r}.",
                f"It knows {known}. Add the host there, or give a plain IP address, for which its defaults hold.",
            )
        settings = _for_user(replace(inventory.defaults.host, address=address), user)
        return Destination(
            host_name=host,
            container_id=container,
            host=settings,
            container=inventory.defaults.container,
            inventory=source,
        )
    settings = _for_user(inventory.hosts[name], user)
    if container not in settings.containers:
        ids = ", ".join(settings.containers) or "none"
        raise UsageError(
            f"{source} has no container {container} on {name}.",
            f"It knows: {ids}. Add `{container}: {{}}` under hosts.{name}.containers to use it with the defaults.",
        )
    return Destination(
        host_name=f"{user}@{name}" if user else name,
        container_id=container,
        host=settings,
        container=settings.containers[container],
        inventory=source,
    )


def known_destinations(inventory: Inventory) -> str:
    """The inventory's hosts and containers in a few words, for messages."""
    hosts = [f"{name} (CT {', '.join(host.containers) or 'none'})" for name, host in inventory.hosts.items()]
    return "; ".join(hosts) or "no host"


def _for_user(host: HostSettings, user: str) -> HostSettings:
    return replace(host, user=user) if user else host


def _host_name(inventory: Inventory, host: str) -> str | None:
    if host in inventory.hosts:
        return host
    for name, settings in inventory.hosts.items():
        if settings.address == host:
            return name
    return None


def _is_ip_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _with_defaults(inventory: Located) -> Located:
    """``inventory`` with ``defaults`` filled into every host and container that leaves a value out.

    Anything of a shape that does not fit is passed on as it is, so that binding names it.
    """
    defaults = _part(inventory, "defaults")
    for_container = _part(defaults, "container")

    def filled(host: Located) -> Located:
        merged = _merge(_part(defaults, "host"), host)
        return _each(merged, "containers", lambda container: _merge(for_container, container))

    return _each(inventory, "hosts", filled)


def _part(whole: Located | None, key: str) -> Located | None:
    return whole.value.get(key) if whole is not None and isinstance(whole.value, dict) else None


def _each(whole: Located, key: str, change: Callable[[Located], Located]) -> Located:
    """``whole`` with every part of its mapping ``key`` changed; null counts as an empty mapping."""
    found = _part(whole, key)
    if found is None or not isinstance((mapping := _or_empty(found)).value, dict):
        return whole
    parts = {name: change(_or_empty(part)) for name, part in mapping.value.items()}
    return replace(whole, value={**whole.value, key: replace(mapping, value=parts)})


def _or_empty(part: Located) -> Located:
    return replace(part, value={}) if part.value is None else part


def _merge(base: Located | None, over: Located) -> Located:
    """``over``, and what ``base`` has beside it where both are mappings."""
    if base is None or not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    own = {key: _merge(base.value.get(key), part) for key, part in over.value.items()}
    return replace(over, value={**base.value, **own})
