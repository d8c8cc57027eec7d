"""One rank's job from its spec to its exit status: prepare, join, train, and say how it ended."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from payload.agent.run_data import note_run_data
from payload.compile.fingerprint import cpu_threads
from payload.compile.first_step import require_warm
from payload.compile.imports import import_compiler
from payload.compile.policy import decide
from payload.data.feature_cache import FeatureCache
from payload.data.prepared import PackedRows
from payload.data.tokens import load_tokenizer
from payload.drafter.model import DFlashDrafter
from payload.errors import PayloadError, ToldToStopError
from payload.recipe import Recipe, recipe_from_dict
from payload.target import Target
from payload.trainer.answering import answer_prompts
from payload.trainer.checkpoint import (
    Progress,
    Snapshot,
    checkpoint_folders,
    checkpoint_to_resume,
    read_checkpoint,
    read_progress,
    train_on,
)
from payload.trainer.checkpoint_writer import CheckpointWriter
from payload.trainer.drafter_side import DrafterSide
from payload.trainer.failure import EXIT_FAILED, EXIT_STOPPED, EarlyEnd, Failure, tell
from payload.trainer.heldout import HeldOut
from payload.trainer.initial import initial_weights
from payload.trainer.metrics import MetricsLog
from payload.trainer.offline_features import store_features
from payload.trainer.preparation import Prepared, open_target, prepare_run
from payload.trainer.program import DrafterProgram, TargetProgram, compiles_target, supply_shape
from payload.trainer.ranks import Pace, Ranks, StopSignal, join, leave, say, subgroup
from payload.trainer.reporting import RunReport
from payload.trainer.roles import Roles, roles_of
from payload.trainer.run import Groups, Run
from payload.trainer.summary import write_summaries
from payload.trainer.target_side import TargetSide, run_target
from payload.trainer.transfer import Links

_PATIENCE_S = 3.0
"""How long a rank whose collective failed waits to hear that another rank was the cause."""


def run_job(spec_path: Path, cold_ok: bool = False) -> int:
    """Run this rank's part to its exit status. What a person can act on is said in words, without a traceback."""
    try:
        spec = _read_spec(spec_path)
        recipe = recipe_from_dict(spec["recipe"], str(spec_path))
        ranks = join()
    except PayloadError as error:
        tell(Failure("", error.message, error.hint))
        return EXIT_FAILED
    stop, early_end, writer = StopSignal(ranks.store), EarlyEnd(ranks.store), CheckpointWriter()
    stop.install()
    # A checkpoint that is almost there should not be lost with what came after it.
    early_end.watch(let_finish=writer.settle)
    try:
        roles = roles_of(recipe, ranks.world_size)
        require_warm(spec, ranks.device.type, cold_ok)
        if decide(recipe.compile, ranks.device.type).compiled:
            import_compiler()
        _use_cores(ranks, spec["recipe"])
        groups = Groups(
            drafters=subgroup(roles.drafters),
            targets=subgroup(roles.targets),
            evaluation=subgroup([roles.lead_drafter, *roles.targets]),
            links=Links(roles.links()),
        )
        groups.links.open(ranks.rank, ranks.device)
        status = _train(recipe, spec, spec_path.resolve().parent, ranks, roles, groups, stop, writer)
        # All leave together and alike: the store may live in a rank, and the lead drafter knows how it ended.
        agreed: int = ranks.broadcast_object(status, roles.lead_drafter)
    except Exception as error:  # noqa: BLE001 - the one place where a rank's failure is told
        writer.settle()
        return _leave_early(error, recipe, ranks, stop, early_end)
    early_end.unwatch()
    leave()
    return agreed


def _leave_early(
    error: Exception, recipe: Recipe, ranks: Ranks, stop: StopSignal, early_end: EarlyEnd
) -> int:
    """Tell what happened, unless this rank only suffers from what happened elsewhere; returns the exit status.

    Process groups with other ranks are left as they are: to part in order takes all of them.
    """
    early_end.unwatch()
    if ranks.world_size == 1:
        leave()
    if isinstance(error, torch.OutOfMemoryError):
        error = _out_of_memory(error, recipe)
    if isinstance(error, RuntimeError):
        # What a collective raises when a rank at its other end is gone; that rank, or its death, is told elsewhere.
        elsewhere = early_end.await_status(_PATIENCE_S, or_else=lambda: stop.received)
        if elsewhere is not None or stop.received:
            return EXIT_FAILED if elsewhere is None else elsewhere
    status = EXIT_FAILED
    if isinstance(error, ToldToStopError):
        status = EXIT_STOPPED
        say(str(error))
    elif isinstance(error, PayloadError):
        tell(Failure(_who(recipe, ranks), error.message, error.hint))
    else:
        traceback.print_exception(error)
        sys.stderr.flush()
        tell(
            Failure(
                _who(recipe, ranks),
                f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
                "This is unexpected: its traceback is above.",
            )
        )
    early_end.give(status)
    return status


def _out_of_memory(error: torch.OutOfMemoryError, recipe: Recipe) -> PayloadError:
    return PayloadError(
        f"This GPU's memory is not enough: {next(iter(str(error).splitlines()), '')}",
        f"make estimate RECIPE={recipe.name} says what each role needs. Lower train.batch_size or train.num_anchors "
        "(train.accumulation makes up for it), or spread the drafter with train.shard=fsdp2.",
    )


def _who(recipe: Recipe, ranks: Ranks) -> str:
    if ranks.world_size == 1:
        return ""
    roles = {"target": recipe.topology.targets, "drafter": recipe.topology.drafters}
    own = " and ".join(role for role, members in roles.items() if ranks.rank in members) or "no role"
    return f"rank {ranks.rank} of {ranks.world_size} ({own})"


def _train(
    recipe: Recipe,
    spec: dict[str, Any],
    run_dir: Path,
    ranks: Ranks,
    roles: Roles,
    groups: Groups,
    stop: StopSignal,
    writer: CheckpointWriter,
) -> int:
    is_target = ranks.rank in roles.targets
    is_drafter = ranks.rank in roles.drafters
    lead_target, root = ranks.rank == roles.lead_target, _root_of(run_dir)
    opened, target, held_out, prepared = None, None, None, None
    if lead_target:
        begins = spec.get("resume_from") is None and not checkpoint_folders(run_dir / "checkpoints")
        opened, target, held_out = open_target(recipe, root, ranks.device, stop, begins)
        note_run_data(run_dir, complete=False, answers=opened.answers)
    opened = ranks.hand_out("target", opened, roles.lead_target, stop)
    if is_target and target is None:
        target = Target.load(opened.target, ranks.device, compiles_target(recipe, ranks.device))
    if target is not None and opened.answers is not None:
        tokenizer = load_tokenizer(opened.target)
        answer_prompts(recipe, opened.answers, target, tokenizer, ranks, roles, stop)
    if lead_target and target is not None:
        prepared = prepare_run(recipe, opened, target, root, stop)
        used = {"answers": opened.answers, "packed": prepared.packed.parent, "features": prepared.features}
        note_run_data(run_dir, complete=True, **used)
    prepared = ranks.hand_out("prepared", prepared, roles.lead_target, stop)
    if prepared.features is not None:
        if target is not None:
            store_features(prepared, *_target_program(recipe, prepared, target), ranks, roles, stop)
        ranks.hand_out("features", True, roles.lead_target, stop)
    head, embedding = _share_weights(prepared, target, ranks, roles)

    identity = f"{recipe.digest()}-{prepared.data_sha256[:16]}-{prepared.weights_sha256[:16]}"
    resumed: Path | None = ranks.broadcast_object(
        checkpoint_to_resume(run_dir, spec.get("resume_from"), identity, say)
        if ranks.rank == roles.lead_drafter
        else None,
        roles.lead_drafter,
    )
    progress = read_progress(resumed) if resumed is not None else Progress(step=0, identity=identity)
    if resumed is not None and progress.step >= recipe.train.steps and ranks.rank == roles.lead_drafter:
        say(
            f"all {recipe.train.steps} steps are done already. To train on, start a new run from its drafter: "
            f"{train_on(resumed)}"
        )
    first_step = progress.step + 1
    run = Run(
        recipe=recipe,
        run_dir=run_dir,
        ranks=ranks,
        roles=roles,
        groups=groups,
        pace=Pace(ranks.store, first_step, recipe.train.steps, recipe.train.prefetch),
        stop=stop,
        config=prepared.config,
        shape=supply_shape(recipe, prepared.config, prepared.dtype),
        first_step=first_step,
        evaluates=bool(recipe.data.eval),
        data_facts=prepared.data_facts,
    )
    side = _target_side(run, prepared, target, held_out) if is_target else None
    if not is_drafter:
        assert side is not None
        run_target(run, side)
        status = 0 if run.pace.last_step == recipe.train.steps else EXIT_STOPPED
    else:
        snapshot = read_checkpoint(resumed) if resumed is not None else None
        program = _drafter_program(run, head, embedding, snapshot)
        status = _run_drafter(run, program, side, progress, writer)
    write_summaries(run, side)
    return status


def _target_side(run: Run, prepared: Prepared, target: Target | None, held_out: HeldOut | None) -> TargetSide:
    """A collective of the targets, which get the held-out prompts that the lead target has read."""
    assert target is not None
    if run.groups.targets is not None:
        # Not through the store, which takes no value of more than 8 MiB.
        box = [held_out]
        dist.broadcast_object_list(
            box, src=run.roles.lead_target, group=run.groups.targets, device=torch.device("cpu")
        )
        [held_out] = box
    assert held_out is not None
    program, rows = _target_program(run.recipe, prepared, target)
    cache = FeatureCache(prepared.features) if prepared.features is not None else None
    return TargetSide(run, program, rows, held_out, cache)


def _target_program(recipe: Recipe, prepared: Prepared, target: Target) -> tuple[TargetProgram, PackedRows]:
    program = TargetProgram(target, prepared.config.target_layer_ids, recipe.loss.kind == "kl")
    return program, PackedRows(prepared.packed, recipe.train.batch_size, recipe.train.seed)


def _drafter_program(
    run: Run, head: torch.Tensor, embedding: torch.Tensor, snapshot: Snapshot | None
) -> DrafterProgram:
    recipe = run.recipe
    torch.manual_seed(recipe.train.seed)
    # On the device itself: a billion random numbers take a core of the host a quarter of a minute.
    with run.ranks.device:
        drafter = DFlashDrafter(run.config)
    lead = run.ranks.rank == run.roles.lead_drafter
    name = recipe.train.from_pretrained
    if snapshot is not None:
        drafter.load_state_dict(snapshot.weights)
    elif name is not None:
        drafter.load_state_dict(initial_weights(name, run.config, say if lead else lambda line: None))
        if lead:
            say(f"beginning with the drafter of {name}")
    decision = decide(recipe.compile, run.ranks.device.type)
    if lead:
        say(f"compile: {'yes' if decision.compiled else 'no'}: {decision.reason}")
    program = DrafterProgram(
        recipe,
        drafter.to(run.ranks.device),
        head,
        embedding,
        run.groups.drafters,
        compiled=decision.compiled and recipe.compile != "off",
    )
    if snapshot is not None:
        program.optimizer.load_state_tensors(snapshot.optimizer)
    return program


def _run_drafter(
    run: Run, program: DrafterProgram, side: TargetSide | None, progress: Progress, writer: CheckpointWriter
) -> int:
    if run.ranks.rank != run.roles.lead_drafter:
        DrafterSide(run, program, side, progress, writer, None).run()
        return 0 if run.pace.last_step == run.recipe.train.steps else EXIT_STOPPED
    with MetricsLog(run.run_dir, run.first_step) as log:
        report = RunReport(run, log)
        report.started(sum(parameter.numel() for parameter in program.drafter.parameters()))
        return report.ended(DrafterSide(run, program, side, progress, writer, report).run())


def _share_weights(
    prepared: Prepared, target: Target | None, ranks: Ranks, roles: Roles
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head and embedding [V,H] on every rank; those without a target get them from the lead target."""
    shape = (prepared.config.vocab_size, prepared.config.hidden_size)

    def share(own: torch.Tensor | None) -> torch.Tensor:
        weight = own if own is not None else torch.empty(shape, dtype=prepared.dtype, device=ranks.device)
        if set(roles.drafters) - set(roles.targets):
            dist.broadcast(weight.detach(), src=roles.lead_target)
        return weight.detach()

    embedding = share(target.embedding_weight if target is not None else None)
    if prepared.tied:
        return embedding, embedding
    return share(target.head_weight if target is not None else None), embedding


def _read_spec(path: Path) -> dict[str, Any]:
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PayloadError(f"The spec {path} cannot be read: {error}", kind="usage") from error
    if not isinstance(spec, dict) or "recipe" not in spec:
        raise PayloadError(f"The spec {path} holds no recipe.", kind="usage")
    return spec


def _root_of(run_dir: Path) -> Path:
    """The container's root when the run lies in ``<root>/runs/<id>``, else the run's folder itself."""
    return run_dir.parent.parent if run_dir.parent.name == "runs" else run_dir


def _use_cores(ranks: Ranks, recipe: dict[str, Any]) -> None:
    """On a CPU, share the cores as warm-up compiled for; torchrun would leave each process with one thread."""
    if ranks.device.type == "cpu":
        torch.set_num_threads(cpu_threads(recipe))
