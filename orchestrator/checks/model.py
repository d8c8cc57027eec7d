"""What a check works with: what was seen in a container, what a run needs of it, and what came of comparing them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.recipes import job_gpus
from orchestrator.settings import ContainerSettings
from payload.places import is_surely_a_folder
from payload.recipe import Recipe

Severity = Literal["ok", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("ok", "warning", "error")

DEFAULT_MASTER_PORT = 29500
"""torch.distributed's own default, used where MASTER_PORT is not set."""

DEMO = "demo"
HUB = "hub:"
"""What a recipe names that is no path: the demo's own target and rows, and rows of the hub."""


@dataclass(frozen=True)
class Finding:
    """What one check found. ``why`` says why it matters and ``fix`` what to type; both are empty when all is well."""

    check: str
    severity: Severity
    seen: str
    why: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Needs:
    """What a run of one recipe asks of one container.

    ``gpus``: the GPUs that it uses, as nvidia-smi numbers them; empty for a run on CPUs. ``cuda``: the version of
    the pinned torch build, null when the pin does not say. ``must_compile``: whether it fails without a compiler.
    ``target``, ``rows`` and ``drafter`` (to begin with) are the paths that the recipe names, as it names them (null and
    none for the demo's own and what is the hub's for certain); ``target_file`` is what the target's folder must hold.
    ``place`` is what a make target takes to mean this container, ``root`` its root.
    """

    recipe: str
    container_id: str
    ranks: int
    gpus: tuple[int, ...]
    cuda: str | None
    must_compile: bool
    port: int = DEFAULT_MASTER_PORT
    target: str | None = None
    target_file: str = ""
    rows: tuple[str, ...] = ()
    drafter: str | None = None
    place: str = ""
    root: str = ""

    @property
    def paths(self) -> list[str]:
        """What the container is asked about."""
        target = [self.target, self.target_file] if self.target is not None else []
        return [*target, *self.rows, *([self.drafter] if self.drafter is not None else [])]

    @property
    def target_may_be_of_the_hub(self) -> bool:
        """By the rule of :func:`payload.places.place_or_hub_name`."""
        return self.target is not None and not is_surely_a_folder(self.target)


@dataclass(frozen=True)
class Seen:
    """What a container and its host answered.

    ``facts``: the agent's verb of that name. ``config``: ``pct config``, null when it could not be asked.
    ``clock_ahead_s``: the container's clock less the desk's. ``cuda``: what ``payload.cuda_init`` answered, null when
    it was not asked, for the reason ``cuda_untried``.
    """

    facts: Mapping[str, Any]
    config: Mapping[str, str] | None = None
    clock_ahead_s: float | None = None
    clock_uncertainty_s: float = 0.0
    cuda: Mapping[str, Any] | None = None
    cuda_untried: str = "there is no venv yet"


def needs_of(
    settings: ContainerSettings, container_id: str, recipe: Recipe, place: str = "", *, resumes: bool = False
) -> Needs:
    """What ``recipe`` needs of a container with these settings, which ``place`` means on a command line.

    ``resumes``: it goes on from a checkpoint, and not from the drafter that the recipe begins with.

    A recipe in float32, and any with a CPU build of torch, runs on CPUs and asks for no GPU.
    """
    ranks = recipe.topology.world_size
    target = None if recipe.target.model == DEMO else recipe.target.model
    sources = dict.fromkeys((*recipe.data.train, *recipe.data.eval))
    wants_gpus = not _is_cpu_build(settings) and recipe.target.dtype != "float32"
    return Needs(
        recipe=recipe.name,
        container_id=container_id,
        ranks=ranks,
        gpus=tuple(job_gpus(settings) or range(ranks)) if wants_gpus else (),
        cuda=_pinned_cuda(settings),
        must_compile=wants_gpus or recipe.compile == "on",
        port=_master_port(settings),
        target=target,
        target_file=f"{target}/{recipe.target.gguf_file or 'config.json'}" if target else "",
        rows=tuple(source for source in sources if source != DEMO and not source.startswith(HUB)),
        drafter=None if resumes else recipe.train.from_pretrained,
        place=place,
        root=settings.root,
    )


def _is_cpu_build(settings: ContainerSettings) -> bool:
    """Whether the pin is a build without CUDA, as far as it says; without a word, the inventory's GPUs decide."""
    torch = settings.torch
    if torch.backend is not None:
        return torch.backend == "cpu"
    return torch.cuda is None and not settings.gpus and not job_gpus(settings)


def _pinned_cuda(settings: ContainerSettings) -> str | None:
    """``12.8`` for the backend ``cu128``."""
    named = re.fullmatch(r"cu(\d+)(\d)", settings.torch.backend or "")
    return settings.torch.cuda or (f"{named[1]}.{named[2]}" if named else None)


def _master_port(settings: ContainerSettings) -> int:
    text = settings.env.get("MASTER_PORT", "")
    return int(text) if text.isascii() and text.isdigit() and 0 < int(text) < 65536 else DEFAULT_MASTER_PORT


def number(value: object) -> float | None:
    """``value`` when it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def text(value: object) -> str:
    """``value`` when it is text, else nothing."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> Mapping[str, Any]:
    """``value`` when it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def mappings(value: object) -> list[Mapping[str, Any]]:
    """The objects of a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def going_on(facts: Mapping[str, Any]) -> set[str]:
    """The ids of the runs that are going on."""
    return {text(run.get("run_id")) for run in mappings(facts.get("runs"))} - {""}


def gib(count: float) -> str:
    """Bytes for a person."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def pid(process: Mapping[str, Any]) -> str:
    """The process id of a process that the facts describe."""
    found = number(process.get("pid"))
    return "?" if found is None else f"{found:.0f}"


def named(process: Mapping[str, Any]) -> str:
    """A process that the facts describe, for a person: its id, its command, and the run it belongs to."""
    run_id = text(process.get("run_id"))
    command = text(process.get("command"))[:80] or "?"
    return f"process {pid(process)} ({command})" + (f" of run {run_id}" if run_id else "")
