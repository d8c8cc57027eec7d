"""inventory.yaml: which hosts and containers there are, and what is pinned on them.

Every fault is named with file and line, all of a file at once. A value that a container does not set comes from
``defaults``, and from the model's own default after that.
"""

from __future__ import annotations

import copy
import ipaddress
import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from orchestrator.errors import UsageError

DEFAULT_INVENTORY = Path("inventory.yaml")
MOST_GPUS = 1024
MOST_FAULTS = 20
"""Of an inventory, that one message names."""
CONTAINER_ID = re.compile(r"[1-9][0-9]{2,8}")
"""Proxmox's numbers of guests: 100 to 999999999 (pve-vmid)."""
DEFAULT_CONTAINER_PATH = (
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
)


_REASONS = {
    "extra_forbidden": "there is no such key",
    "int_parsing": "a whole number is needed",
    "int_type": "a whole number is needed",
    "float_parsing": "a number is needed",
    "bool_parsing": "true or false is needed",
    "string_type": "text is needed (quote it)",
    "dict_type": "a mapping is needed",
    "model_type": "a mapping is needed",
    "greater_than": "the number is too small",
    "greater_than_equal": "the number is too small",
    "less_than": "the number is too large",
    "less_than_equal": "the number is too large",
}
"""Pydantic's commonest faults in this file's words."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TorchPin(_Section):
    """The one torch build that a venv may hold.

    ``backend`` names the build's index by uv's ``--torch-backend`` (``cu128``, ``cpu``); null takes torch from the
    ordinary indexes and find-links. ``index_url`` replaces the backend's own index by a mirror of it. ``cuda`` and
    ``git`` (``torch.version.cuda`` and ``torch.version.git_version``, or a prefix of it) are checked after the
    install when they are set; without ``cuda``, what the backend's name says is checked.
    """

    version: str = "2.11.0"
    backend: str | None = "cu128"
    index_url: str | None = None
    cuda: str | None = None
    git: str | None = None

    @field_validator("version", mode="after")
    @classmethod
    def _exact(cls, version: str) -> str:
        if not re.fullmatch(r"\d+\.\d+\.\d+([A-Za-z0-9.+]*)", version):
            raise ValueError("an exact version such as 2.11.0, without operators")
        return version

    @field_validator("backend", mode="after")
    @classmethod
    def _backend_name(cls, backend: str | None) -> str | None:
        if backend is not None and not re.fullmatch(r"[a-z]+[a-z0-9.]*", backend):
            raise ValueError("a backend such as cu128, cu130 or cpu")
        return backend

    @field_validator("git", mode="after")
    @classmethod
    def _git_prefix(cls, git: str | None) -> str | None:
        if git is not None and not re.fullmatch(r"[0-9a-f]{7,40}", git):
            raise ValueError("7 to 40 hex digits of torch.version.git_version")
        return git


class IndexSettings(_Section):
    """Where packages come from: what uv in the container is told of indexes, certificates and proxies."""

    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    certificate: str | None = None
    http_proxy: str | None = None
    https_proxy: str | None = None
    no_proxy: str | None = None
    timeout_s: Annotated[int, Field(gt=0)] = 300
    offline: bool = False


Gpus = tuple[Annotated[int, Field(ge=0)], ...]


class ContainerSettings(_Section):
    """One LXC container and what is pinned in it."""

    root: str = "/opt/dflash"
    python: str = "python3"
    path: tuple[str, ...] = DEFAULT_CONTAINER_PATH
    home: str = "/root"
    recipe: str = "qwen3-8b"
    gpus: Annotated[int, Field(ge=0)] = 0
    targets: Gpus | None = None
    drafters: Gpus | None = None
    torch: TorchPin = TorchPin()
    index: IndexSettings = IndexSettings()
    env: dict[str, str] = {}

    @field_validator("root", mode="after")
    @classmethod
    def _root_is_a_folder_of_its_own(cls, root: str) -> str:
        path = PurePosixPath(root)
        if not path.is_absolute() or len(path.parts) < 3 or ".." in path.parts or "\0" in root:
            raise ValueError("an absolute folder of its own, such as /opt/dflash")
        return str(path)

    @field_validator("python", "home", mode="after")
    @classmethod
    def _word(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_./][^\s=\0]*", value):
            raise ValueError("a name or path without spaces")
        return value

    @field_validator("env", mode="after")
    @classmethod
    def _variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
                raise ValueError(f"{name!r} cannot be set in an environment")
        return env

    @field_validator("targets", "drafters", mode="before")
    @classmethod
    def _range(cls, value: Any) -> Any:
        """``0-4`` and ``[0, 1, 2, 3, 4]`` are the same."""
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", value)
            if not match:
                raise ValueError("GPU numbers as a list, or a range such as 0-4")
            first, last = int(match[1]), int(match[2] or match[1])
            if last - first >= MOST_GPUS:
                raise ValueError(f"a range of more than {MOST_GPUS} GPUs")
            return tuple(range(first, last + 1))
        return value

    @model_validator(mode="after")
    def _roles_fit_the_gpus(self) -> ContainerSettings:
        if (self.targets is None) != (self.drafters is None):
            raise ValueError("targets and drafters go together")
        for role, gpus in (("targets", self.targets), ("drafters", self.drafters)):
            if gpus is None:
                continue
            if not gpus or len(set(gpus)) != len(gpus):
                raise ValueError(f"{role}: at least one GPU, and none twice")
            if self.gpus and max(gpus) >= self.gpus:
                raise ValueError(
                    f"{role}: GPU {max(gpus)} of a container that has {self.gpus} (0-{self.gpus - 1})"
                )
        return self


def _container_id(text: str) -> str:
    if not CONTAINER_ID.fullmatch(text):
        raise ValueError("not a container's id: Proxmox numbers them from 100")
    return text


class HostSettings(_Section):
    """One Proxmox host and how to reach it."""

    address: str | None = None
    port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    user: str = "root"
    identity_file: str | None = None
    known_hosts: str | None = None
    pct: str = "/usr/sbin/pct"
    sudo: bool | None = None
    connect_timeout_s: Annotated[float, Field(gt=0, le=600, allow_inf_nan=False)] = 10.0
    silence_timeout_s: Annotated[float, Field(ge=1, le=600, allow_inf_nan=False)] = 15.0
    containers: dict[Annotated[str, AfterValidator(_container_id)], ContainerSettings] = {}


class Defaults(_Section):
    """What every host and container starts from."""

    host: HostSettings = HostSettings()
    container: ContainerSettings = ContainerSettings()


class Inventory(_Section):
    defaults: Defaults = Defaults()
    hosts: dict[str, HostSettings] = {}


class Destination(_Section):
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
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"There is no inventory at {path}.",
            "Name one with INVENTORY=<file>, or copy the shipped inventory.yaml.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from None
    lines: dict[tuple[str, ...], int] = {}
    faults: list[tuple[int, str]] = []
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _index_lines(node, (), lines, faults)
        raw = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{path}:{line}: not YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not YAML: {error}.") from None
    except ValueError as error:
        raise UsageError(
            f"{path}: a value cannot be read: {error}.", "Quote it if it is meant as text."
        ) from None
    except RecursionError:
        raise UsageError(f"{path}: it is nested without end (an alias of itself?).") from None
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise UsageError(f"{path}:1: an inventory is a mapping with `hosts:`, not a {type(raw).__name__}.")
    inventory = None
    try:
        inventory = Inventory.model_validate(_with_defaults(raw))
    except ValidationError as error:
        faults += _told(error, lines)
    if inventory is None or faults:
        # Where a fault is named twice, by two parts of one value, once is enough.
        told = list(dict.fromkeys(f"{path}:{line}: {what}." for line, what in sorted(faults)))
        more = len(told) - MOST_FAULTS
        raise UsageError("\n".join(told[:MOST_FAULTS]), f"And {more} more faults." if more > 0 else "")
    return inventory


def _told(error: ValidationError, lines: dict[tuple[str, ...], int]) -> list[tuple[int, str]]:
    """Each fault that pydantic found, as its line and what it is."""
    found = {}
    for fault in error.errors(include_url=False):
        # Pydantic's own mark for the key of a mapping, where its value is not meant.
        location = tuple(str(part) for part in fault["loc"] if part != "[key]")
        reason = _REASONS.get(fault["type"]) or fault["msg"].removeprefix("Value error, ")
        found[location] = reason
    return [
        (_line_of(location, lines), f"{'.'.join(location) or 'inventory'}: {reason}")
        for location, reason in found.items()
        if location in lines or found.get(_default_of(location)) != reason
    ]


def _default_of(location: tuple[str, ...]) -> tuple[str, ...]:
    """Where a value of a host or container comes from that does not set it; faults are told there."""
    if location[0:1] != ("hosts",) or len(location) < 3:
        return ()
    if location[2] == "containers":
        return ("defaults", "container", *location[4:])
    return ("defaults", "host", *location[2:])


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
    if not CONTAINER_ID.fullmatch(container):
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
        settings = inventory.defaults.host.model_copy(
            update={"address": address} | ({"user": user} if user else {})
        )
        return Destination(
            host_name=host,
            container_id=container,
            host=settings,
            container=inventory.defaults.container,
            inventory=source,
        )
    settings = inventory.hosts[name].model_copy(update={"user": user} if user else {})
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


def _with_defaults(raw: dict[str, Any]) -> dict[str, Any]:
    """``raw`` with ``defaults`` filled into every host and container that leaves a value out.

    Anything of a shape that the models will refuse is passed on as it is, so that they name it.
    """
    raw = copy.deepcopy(raw)
    defaults = raw.get("defaults")
    defaults = defaults if isinstance(defaults, dict) else {}
    hosts = raw.get("hosts")
    if hosts is None:
        raw.pop("hosts", None)
        return raw
    if not isinstance(hosts, dict):
        return raw
    filled: dict[str, Any] = {}
    for name, host in hosts.items():
        host = {} if host is None else host
        if isinstance(host, dict):
            host = _merge(defaults.get("host"), host)
            containers = host.get("containers")
            if isinstance(containers, dict):
                host["containers"] = {
                    str(key): _merge(defaults.get("container"), {} if value is None else value)
                    for key, value in containers.items()
                }
        filled[str(name)] = host
    raw["hosts"] = filled
    return raw


def _merge(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    merged = dict(base)
    for key, value in over.items():
        merged[key] = _merge(base.get(key), value) if key in base else value
    return merged


def _index_lines(
    node: yaml.Node | None,
    location: tuple[str, ...],
    lines: dict[tuple[str, ...], int],
    faults: list[tuple[int, str]],
) -> None:
    """Note the line of each part, and as faults the keys that stand twice or are read as another number."""
    if node is None:
        return
    lines.setdefault(location, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(getattr(key, "value", ""))
            line = key.start_mark.line + 1
            inner = (*location, name)
            if name in seen:
                faults.append((line, f"{name!r} stands here a second time"))
                # YAML takes the last one, of which alone a value can be wrong.
                for other in [known for known in lines if known[: len(inner)] == inner]:
                    del lines[other]
            seen.add(name)
            lines[inner] = line
            if location[2:] == ("containers",) and re.fullmatch(r"0[0-7]+", name):
                faults.append(
                    (line, f"{'.'.join(inner)}: YAML reads a number that begins with 0 as an octal one")
                )
            _index_lines(value, inner, lines, faults)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            _index_lines(value, (*location, str(number)), lines, faults)


def _line_of(location: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> int:
    """The line of the innermost part of ``location`` that stands in the file."""
    while location and location not in lines:
        location = location[:-1]
    return lines.get(location, 1)
