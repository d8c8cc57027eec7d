"""Checkpoints of a run: complete or absent, verified before they are used, the newest few and the best kept.

``checkpoints/step-000100/`` holds ``trainer.safetensors`` (fp32 master weights and optimizer state), ``state.json``
(the step and what the run has measured so far), ``drafter/`` (the export in z-lab's format) and ``manifest.json``.
Everything random in training is a function of the seed and the step, so that is all an exact resume needs.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from payload.data.sealed import MANIFEST, open_sealed, sealed_folder
from payload.drafter.checkpoint import save_drafter
from payload.drafter.config import DrafterConfig
from payload.errors import PayloadError
from payload.trainer.shards import whole_tensor

_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Progress:
    """Where a run stands. ``identity`` names recipe, data and target; a resume checks it."""

    step: int
    identity: str
    tokens: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    accepted_before: float | None = None
    accepted: float | None = None
    """Held-out accepted length at this step, where it was measured."""
    best_accepted: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds in memory: ``weights`` (fp32 masters), ``optimizer`` state, and progress.

    Tensors may be sharded over the drafters until they are copied.
    """

    progress: Progress
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]

    def copied(self, into: Snapshot | None = None) -> Snapshot:
        """The same in memory of the host that training does not write to: that of the copy ``into``, if there is one.

        Memory that is used again needs no page of it made anew, which takes longer than the copy itself. Sharded
        tensors are gathered one after the other, so that no device ever holds two of them whole; the other drafters
        must call ``help_to_copy`` then.
        """
        weights = _copies(self.weights, into.weights if into is not None else {})
        optimizer = _copies(self.optimizer, into.optimizer if into is not None else {})
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return Snapshot(self.progress, weights, optimizer)

    def help_to_copy(self) -> None:
        """Take part in the gathering for the one drafter that copies."""
        for tensor in (*self.weights.values(), *self.optimizer.values()):
            whole_tensor(tensor)


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return checkpoints / f"step-{step:06d}"


def write_checkpoint(
    checkpoints: Path, snapshot: Snapshot, config: DrafterConfig, card: str | None = None
) -> Path:
    """Write a snapshot and the drafter's export as one sealed folder; an older one of the same step is replaced.

    What writes that were killed have left in ``checkpoints`` is removed first. Raises ``PayloadError`` when the files
    cannot be written.
    """
    try:
        return _write(checkpoints, snapshot, config, card)
    except (OSError, SafetensorError) as error:
        raise PayloadError(
            f"The checkpoint of step {snapshot.progress.step} cannot be written to {checkpoints}: {error}",
            "Make room there (the checkpoints before it are whole), then resume the run.",
        ) from error


def _write(checkpoints: Path, snapshot: Snapshot, config: DrafterConfig, card: str | None) -> Path:
    for left in checkpoints.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)
    final = checkpoint_folder(checkpoints, snapshot.progress.step)
    tensors = {f"weights.{name}": _stored(tensor) for name, tensor in snapshot.weights.items()}
    tensors |= {f"optimizer.{name}": _stored(tensor) for name, tensor in snapshot.optimizer.items()}
    with sealed_folder(final, step=snapshot.progress.step) as partial:
        save_file(tensors, partial / "trainer.safetensors")
        (partial / "state.json").write_text(json.dumps(asdict(snapshot.progress), indent=1), encoding="utf-8")
        save_drafter(partial / "drafter", snapshot.weights, config, card)
    return final


def read_checkpoint(folder: Path) -> Snapshot:
    """Read a checkpoint that ``newest_checkpoint`` has verified. Raises ``PayloadError`` when it cannot be read."""
    try:
        tensors = load_file(folder / "trainer.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise PayloadError(f"The checkpoint {folder} cannot be read: {error}") from error

    def part(prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    return Snapshot(read_progress(folder), part("weights."), part("optimizer."))


def read_progress(folder: Path) -> Progress:
    """Where the run of a verified checkpoint stood. Raises ``PayloadError`` when that cannot be read."""
    try:
        return Progress(**json.loads((folder / "state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise PayloadError(f"The checkpoint {folder} cannot be read: {error}") from error


def newest_checkpoint(checkpoints: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; each broken one on the way is passed over with a warning."""
    for step, folder in sorted(checkpoint_folders(checkpoints).items(), reverse=True):
        try:
            open_sealed(folder)
            read_progress(folder)
        except PayloadError as error:
            warn(f"warning: the checkpoint of step {step} is not used: {error.message}")
        else:
            return folder
    return None


def checkpoint_to_resume(
    run_dir: Path, resume_from: str | None, identity: str, warn: Callable[[str], None]
) -> Path | None:
    """The newest whole checkpoint of a run, or of the run in the folder ``resume_from``, seen from ``run_dir``.

    Raises ``PayloadError`` (kind refused) when ``resume_from`` has none, or it is of another
    recipe, other data or another target.
    """
    found = newest_checkpoint(run_dir / "checkpoints", warn)
    if found is None and resume_from is not None:
        checkpoints = (run_dir / resume_from / "checkpoints").resolve()
        found = newest_checkpoint(checkpoints, warn)
        if found is None:
            raise PayloadError(
                f"There is no usable checkpoint in {checkpoints} to resume from.",
                hint="Name a run that has written one, or start a new run.",
                kind="refused",
            )
    if found is not None and read_progress(found).identity != identity:
        raise PayloadError(
            "The checkpoint to resume from was made by another recipe, on other data or with another target.",
            hint="Resume with the recipe, data and target of that run: a resume is exact, and all steps depend on "
            f"train.steps. To train otherwise or on, start a new run from its drafter: {train_on(found)}.",
            kind="refused",
        )
    return found


def train_on(checkpoint: Path) -> str:
    """What a recipe says to begin with the drafter of the run that wrote ``checkpoint``."""
    run_dir = checkpoint.resolve().parent.parent
    name = f"runs/{run_dir.name}" if run_dir.parent.name == "runs" else run_dir
    return f"train.from_pretrained={name}"


def find_drafter(path: Path, checkpoint: str, warn: Callable[[str], None]) -> Path:
    """The drafter's folder that ``path`` is, or that a whole checkpoint of the run ``path`` holds.

    ``checkpoint`` is ``newest``, ``best`` or a step's number. Raises PayloadError (kind usage) when there is none.
    """
    if (path / "config.json").is_file():
        return path
    every = folders = checkpoint_folders(path / "checkpoints")
    if checkpoint.isdecimal():
        folders = {step: folder for step, folder in folders.items() if step == int(checkpoint)}
    elif checkpoint == "best":
        best = best_checkpoint(path / "checkpoints")
        folders = {} if best is None else {best: folders[best]}
    elif checkpoint != "newest":
        raise PayloadError(
            f"checkpoint is {checkpoint!r}.", "It is newest, best or a step's number.", "usage"
        )
    for _, folder in sorted(folders.items(), reverse=True):
        try:
            open_sealed(folder)
        except PayloadError as error:
            warn(f"warning: passed over: {error.message}")
            continue
        return folder / "drafter"
    which = {"newest": "", "best": " that was measured"}.get(checkpoint, f" of step {checkpoint}")
    whole = ", ".join(str(step) for step, folder in sorted(every.items()) if (folder / MANIFEST).is_file())
    raise PayloadError(
        f"There is no drafter in {path}: neither an export nor a run with a whole checkpoint{which}.",
        hint=f"It has checkpoints of step {whole}."
        if whole
        else "Name a run that has written a checkpoint (make status shows which have), or a folder with config.json "
        "and model.safetensors.",
        kind="usage",
    )


def drop_old_checkpoints(checkpoints: Path, keep_last: int) -> list[int]:
    """Delete all but the newest ``keep_last`` and the one with the greatest accepted length; returns dropped steps."""
    folders = checkpoint_folders(checkpoints)
    dropped = sorted(set(folders) - {*sorted(folders)[-keep_last:], best_checkpoint(checkpoints)})
    for step in dropped:
        # The manifest goes first: what is left of an interrupted deletion is no checkpoint.
        (folders[step] / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(folders[step])
    return dropped


def best_checkpoint(checkpoints: Path) -> int | None:
    """The step with the greatest held-out accepted length, the later of equals; None when none was measured."""
    scores = {
        step: accepted
        for step, folder in checkpoint_folders(checkpoints).items()
        if (accepted := _accepted(folder)) is not None
    }
    return max(scores, key=lambda step: (scores[step], step)) if scores else None


def checkpoint_folders(checkpoints: Path) -> dict[int, Path]:
    """Folders of checkpoints by step, whole or not."""
    if not checkpoints.is_dir():
        return {}
    found = ((_NAME.fullmatch(path.name), path) for path in checkpoints.iterdir() if path.is_dir())
    return {int(match.group(1)): path for match, path in found if match}


def _accepted(folder: Path) -> float | None:
    try:
        accepted = json.loads((folder / "state.json").read_text(encoding="utf-8"))["accepted"]
    except (OSError, ValueError, KeyError):
        return None
    return accepted if isinstance(accepted, int | float) else None


def _copies(tensors: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    copies = {}
    for name, tensor in tensors.items():
        own = into.get(name)
        if own is None:
            own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        # No name for the whole tensor: it would keep it while the next one is gathered.
        copies[name] = own.copy_(whole_tensor(tensor.detach()), non_blocking=True)
    return copies


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()
