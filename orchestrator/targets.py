"""Which containers ``HOST`` and ``CT`` mean where a command takes several: names, lists, ranges, ``all``."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.inventory import Destination, Inventory, known_destinations, resolve

ALL = "all"
MOST_CONTAINERS = 4096


def is_several(host: str | None, container: str | None) -> bool:
    """Whether the two name more than one container, or may."""
    return any(
        text == ALL or "," in text or _range(text) is not None for text in (host or "", container or "")
    )


def select(inventory: Inventory, host: str | None, container: str | None, source: Path) -> list[Destination]:
    """The containers that ``HOST`` and ``CT`` mean, each once, in the order in which they were named.

    ``host``: one host as :func:`orchestrator.inventory.resolve` takes it, several with commas, or ``all`` of the
    inventory. ``container``: one id, ids and ranges with commas (``200,210-217``), or ``all`` that the inventory has on
    the host, which is what nothing means beside ``HOST=all``. Of all hosts, those that lack a container are left out.
    Raises :class:`UsageError` when nothing is left, or a name is not known.
    """
    every_host = host == ALL
    hosts = list(inventory.hosts) if every_host else [name for name in (host or "").split(",") if name]
    if not hosts:
        resolve(inventory, None, container, source)  # raises, and lists what is known
    wanted = container or (ALL if every_host else None)
    found: dict[tuple[str, str], Destination] = {}
    for name in hosts:
        for number in _numbers(inventory, name, wanted, source):
            if every_host and number not in inventory.hosts[name].containers:
                continue
            destination = resolve(inventory, name, number, source)
            found[destination.host_name, destination.container_id] = destination
    if not found:
        raise UsageError(
            f"{source}: HOST={host} CT={container or ALL} means no container.",
            f"It knows {known_destinations(inventory)}.",
        )
    return list(found.values())


def _numbers(inventory: Inventory, host: str, wanted: str | None, source: Path) -> list[str | None]:
    """The container ids that ``wanted`` means on ``host``; None where it says nothing."""
    if wanted == ALL:
        name = host.rpartition("@")[2]
        by_address = (known for known, settings in inventory.hosts.items() if settings.address == name)
        known = name if name in inventory.hosts else next(by_address, None)
        if known is None:
            resolve(inventory, host, "100", source)  # raises for a name that is none
            raise UsageError(
                f"CT=all: {source} does not know {host}, so it cannot know its containers.",
                "Name them (CT=200,201), or add the host to the inventory.",
            )
        return list(inventory.hosts[known].containers)
    if wanted is None:
        return [None]
    numbers: list[str | None] = []
    for part in wanted.split(","):
        span = _range(part)
        if span is None:
            numbers.append(part)
            continue
        if len(span) > MOST_CONTAINERS:
            raise UsageError(f"CT={part} is a range of more than {MOST_CONTAINERS} containers.")
        numbers += map(str, span)
    return numbers


def _range(text: str) -> range | None:
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text, re.ASCII)
    return range(int(match[1]), int(match[2]) + 1) if match else None
