"""One rank's job from its spec to its exit status: prepare, join, train, and say how it ended."""

from __future__ import annotations

import hashlib
import json
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from payload.compile.fingerprint import cpu_threads
from payload.compile.first_step import require_warm
from payload.compile.policy import decide
from payload.data.feature_cache import FeatureCache, FeatureShape, RowFeatures, write_feature_cache
from payload.data.prepared import PackedRows, Preparation, prepare
from payload.data.regenerate import GenerationSettings, regenerate
from payload.data.rows import Row, read_jsonl, read_rows
from payload.data.sealed import MANIFEST, file_sha256
from payload.demo.target import ensure_demo_target
from payload.drafter.config import DrafterConfig
from payload.drafter.model import DFlashDrafter
from payload.errors import PayloadError
from payload.places import place_or_hub_name
from payload.recipe import Recipe, TargetSpec, recipe_from_dict
from payload.target import Target
from payload.trainer.checkpoint import Progress, Snapshot, newest_checkpoint, read_checkpoint, read_progress
from payload.trainer.heldout import HeldOut, held_out_prompts
from payload.trainer.loop import DrafterSide, Groups, Run, TargetSide, run_target
from payload.trainer.metrics import MetricsLog
from payload.trainer.program import DrafterProgram, TargetProgram, drafter_config_for, supply_shape
from payload.trainer.ranks import Pace, Ranks, StopSignal, join, leave, say, subgroup
from payload.trainer.roles import Roles, roles_of

EXIT_FAILED = 1
EXIT_STOPPED = 143

_IMPROVED_RATIO = 1.5
"""How far the accepted length must rise above its start for ``train.assert_improves``."""


@dataclass(frozen=True)
class Prepared:
    """What the lead target found out and every rank needs. ``packed`` is the training set's file."""

    target: TargetSpec
    packed: Path
    data_sha256: str
    data_facts: dict[str, Any]
    config: DrafterConfig
    dtype: torch.dtype
    tied: bool
    features: Path | None
    """The offline feature cache, when the recipe asks for one."""


def run_job(spec_path: Path, cold_ok: bool = False) -> int:
    """Run this rank's part. Errors that a person can act on are said in words, on the log, without a traceback."""
    try:
        return _run(spec_path.resolve(), cold_ok)
    except PayloadError as error:
        say(f"error: {error}")
        return EXIT_FAILED
    except Exception:  # noqa: BLE001 - the log must hold what went wrong, before torchrun ends the other ranks
        traceback.print_exc()
        sys.stderr.flush()
        return EXIT_FAILED


def _run(spec_path: Path, cold_ok: bool) -> int:
    spec = _read_spec(spec_path)
    recipe = recipe_from_dict(spec["recipe"], str(spec_path))
    run_dir = spec_path.parent
    ranks = join()
    try:
        roles = roles_of(recipe, ranks.world_size)
        require_warm(spec, ranks.device.type, cold_ok)
        _use_cores(ranks, spec["recipe"])
        stop = StopSignal(ranks.store)
        stop.install()
        groups = Groups(
            drafters=subgroup(roles.drafters),
            targets=subgroup(roles.targets),
            evaluation=subgroup([roles.lead_drafter, *roles.targets]),
        )
        status = _train(recipe, spec, run_dir, ranks, roles, groups, stop)
        # All leave together and alike: the store may live in a rank, and the lead drafter knows how it ended.
        agreed: int = ranks.broadcast_object(status, roles.lead_drafter)
        return agreed
    finally:
        leave()


def _train(
    recipe: Recipe,
    spec: dict[str, Any],
    run_dir: Path,
    ranks: Ranks,
    roles: Roles,
    groups: Groups,
    stop: StopSignal,
) -> int:
    is_target = ranks.rank in roles.targets
    is_drafter = ranks.rank in roles.drafters
    prepared, target = None, None
    if ranks.rank == roles.lead_target:
        prepared, target = prepare_run(recipe, run_dir, _root_of(run_dir), ranks.device, stop)
    prepared = ranks.broadcast_object(prepared, roles.lead_target)
    if is_target and target is None:
        target = Target.load(prepared.target, ranks.device)
    head, embedding = _share_weights(prepared, target, ranks, roles)

    identity = f"{recipe.digest()}-{prepared.data_sha256[:16]}"
    resumed: Path | None = ranks.broadcast_object(
        _find_checkpoint(run_dir, spec, identity) if ranks.rank == roles.lead_drafter else None,
        roles.lead_drafter,
    )
    progress = read_progress(resumed) if resumed is not None else Progress(step=0, identity=identity)
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
    side = _target_side(run, prepared, target) if is_target else None
    if not is_drafter:
        assert side is not None
        run_target(run, side)
        return 0 if run.pace.last_step == recipe.train.steps else EXIT_STOPPED
    snapshot = read_checkpoint(resumed) if resumed is not None else None
    program = _drafter_program(run, head, embedding, snapshot)
    return _run_drafter(run, program, side, progress)


def prepare_run(
    recipe: Recipe, run_dir: Path, root: Path, device: torch.device, stop: StopSignal
) -> tuple[Prepared, Target]:
    """Bring about target and training set, on the lead target; what is there already is used again."""
    spec = recipe.target
    if spec.model == "demo":
        spec = replace(spec, model=str(ensure_demo_target(root, say, lambda: stop.received)))
    target = Target.load(spec, device)
    tokenizer = load_tokenizer(spec)
    config = drafter_config_for(recipe, target.config, tokenizer.mask_token_id)
    packed = run_dir / "data" / "packed.safetensors"
    rows = _training_rows(recipe, spec, root, target, tokenizer, stop)
    facts = prepare(rows, tokenizer, recipe.data.max_length, recipe.data.min_loss_tokens, packed)
    for line in facts.describe():
        say(line)
    program = TargetProgram(target, config.target_layer_ids, recipe.loss.kind == "kl")
    features = None
    if recipe.data.features == "offline":
        features = ensure_features(recipe, program, packed, root, stop)
    prepared = Prepared(
        target=spec,
        packed=packed,
        data_sha256=file_sha256(packed),
        data_facts=_facts(recipe, facts),
        config=config,
        dtype=target.dtype,
        tied=target.head_weight is target.embedding_weight,
        features=features,
    )
    return prepared, target


def load_tokenizer(spec: TargetSpec) -> Any:
    """The target's own tokenizer. Raises ``PayloadError`` when there is none."""
    from transformers import AutoTokenizer

    options = {"gguf_file": spec.gguf_file} if spec.gguf_file else {}
    try:
        return AutoTokenizer.from_pretrained(
            place_or_hub_name(spec.model), trust_remote_code=spec.trust_remote_code, **options
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise PayloadError(f"The tokenizer of {spec.model} cannot be loaded: {error}") from error


def _training_rows(
    recipe: Recipe, spec: TargetSpec, root: Path, target: Target, tokenizer: Any, stop: StopSignal
) -> Iterable[Row]:
    data = recipe.data
    rows = read_rows(data.train, "train", data.train_rows, recipe.train.seed)
    if not data.regenerate:
        return rows
    settings = GenerationSettings(
        batch_size=data.regenerate_batch,
        max_new_tokens=data.regenerate_max_new_tokens,
        max_length=data.max_length,
        temperature=data.regenerate_temperature,
        seed=recipe.train.seed,
    )
    key = json.dumps([vars(spec), list(data.train), data.train_rows, vars(settings)], sort_keys=True)
    answers = root / "answers" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl"

    def report(line: str) -> None:
        say(line)
        if stop.received:
            raise PayloadError("Told to stop while answers were being generated; they are kept.")

    regenerate(rows, target.model, tokenizer, answers, settings, report)
    return read_jsonl(answers)


def ensure_features(
    recipe: Recipe, program: TargetProgram, packed: Path, root: Path, stop: StopSignal
) -> Path:
    """The folder of the training set's features, computed when it is not there.

    Its name is a hash of the data, the target and the layers.
    """
    config, target = program.target.config, program.target
    rows = PackedRows(packed, recipe.train.batch_size, recipe.train.seed)
    shape = FeatureShape(
        rows=rows.rows,
        length=rows.row_length,
        features=len(program.layer_ids) * config.hidden_size,
        teacher=config.hidden_size if program.with_teacher else 0,
        dtype=str(target.dtype).removeprefix("torch."),
    )
    key = [file_sha256(packed), vars(recipe.target), list(program.layer_ids), vars(shape)]
    folder = root / "features" / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    if (folder / MANIFEST).is_file():
        say(f"features: using {folder}")
        return folder

    def all_rows() -> Iterator[RowFeatures]:
        for start in range(0, rows.rows, rows.batch_size):
            if stop.received:
                raise PayloadError("Told to stop while features were being computed.")
            numbers = list(range(start, min(start + rows.batch_size, rows.rows)))
            supply = program.produce(rows.gather(numbers).to(target.device))
            for slot in range(len(numbers)):
                yield supply.features[slot], None if supply.teacher is None else supply.teacher[slot]

    write_feature_cache(folder, shape, all_rows(), say)
    return folder


def _target_side(run: Run, prepared: Prepared, target: Target | None) -> TargetSide:
    assert target is not None
    tokenizer = load_tokenizer(prepared.target)
    held_out = (
        held_out_prompts(run.recipe, tokenizer, target.config) if run.evaluates else HeldOut((), frozenset())
    )
    program = TargetProgram(target, run.config.target_layer_ids, run.recipe.loss.kind == "kl")
    rows = PackedRows(prepared.packed, run.recipe.train.batch_size, run.recipe.train.seed)
    cache = FeatureCache(prepared.features) if prepared.features is not None else None
    return TargetSide(run, program, rows, held_out, cache)


def _drafter_program(
    run: Run, head: torch.Tensor, embedding: torch.Tensor, snapshot: Snapshot | None
) -> DrafterProgram:
    recipe = run.recipe
    torch.manual_seed(recipe.train.seed)
    drafter = DFlashDrafter(run.config)
    if snapshot is not None:
        drafter.load_state_dict(snapshot.weights)
    decision = decide(recipe.compile, run.ranks.device.type)
    if run.ranks.rank == run.roles.lead_drafter:
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


def _run_drafter(run: Run, program: DrafterProgram, side: TargetSide | None, progress: Progress) -> int:
    steps = run.recipe.train.steps
    lead = run.ranks.rank == run.roles.lead_drafter
    if not lead:
        DrafterSide(run, program, side, progress, None).run()
        return 0 if run.pace.last_step == steps else EXIT_STOPPED
    with MetricsLog(run.run_dir) as log:
        parameters = sum(parameter.numel() for parameter in program.drafter.parameters())
        layers = ", ".join(map(str, run.config.target_layer_ids))
        say(
            f"drafter: {parameters:,} weights, block {run.config.block_size}, features of target layers {layers}"
        )
        if run.first_step > 1:
            say(f"resuming after step {run.first_step - 1}")
        log.write("start", run.first_step - 1, steps=steps, drafter_parameters=parameters, **run.data_facts)
        ended = DrafterSide(run, program, side, progress, log).run()
        if ended.step < steps:
            log.write("end", ended.step, outcome="stopped")
            say(f"stopped after step {ended.step} of {steps}; the checkpoint of this step resumes the run")
            return EXIT_STOPPED
        status, verdict = judge(run.recipe, ended)
        log.write(
            "end",
            ended.step,
            outcome="finished" if status == 0 else "failed",
            first_loss=ended.first_loss,
            last_loss=ended.last_loss,
            accepted_before=ended.accepted_before,
            accepted_after=ended.accepted,
            verdict=verdict,
        )
        say(verdict)
        return status


def judge(recipe: Recipe, ended: Progress) -> tuple[int, str]:
    """Exit status and last line of a run that went through all its steps."""
    loss = f"loss {ended.first_loss:.3f} -> {ended.last_loss:.3f}"
    if ended.accepted is None or ended.accepted_before is None:
        return 0, f"finished: {loss}"
    accepted = f"held-out accepted length {ended.accepted_before:.2f} -> {ended.accepted:.2f}"
    improved = (
        ended.first_loss is not None
        and ended.last_loss is not None
        and ended.last_loss < ended.first_loss
        and ended.accepted >= _IMPROVED_RATIO * ended.accepted_before
    )
    if not recipe.train.assert_improves:
        return 0, f"finished: {loss}, {accepted}"
    if improved:
        return 0, f"finished: improved: {loss}, {accepted}"
    return EXIT_FAILED, f"failed: no clear improvement: {loss}, {accepted}"


def _find_checkpoint(run_dir: Path, spec: dict[str, Any], identity: str) -> Path | None:
    """The newest whole checkpoint of this run, or of the run that the spec names under ``resume_from``."""
    found = newest_checkpoint(run_dir / "checkpoints", say)
    source = spec.get("resume_from")
    if found is None and source is not None:
        checkpoints = (run_dir / source / "checkpoints").resolve()
        found = newest_checkpoint(checkpoints, say)
        if found is None:
            raise PayloadError(
                f"There is no usable checkpoint in {checkpoints} to resume from.", kind="refused"
            )
    if found is not None and read_progress(found).identity != identity:
        raise PayloadError(
            "The checkpoint to resume from was made by another recipe or on other data.",
            hint="Resume with the recipe and data of that run, or start a new run.",
            kind="refused",
        )
    return found


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


def _facts(recipe: Recipe, preparation: Preparation) -> dict[str, Any]:
    return {
        "sources": ", ".join(recipe.data.train),
        "answers_regenerated": recipe.data.regenerate,
        "documents": preparation.documents,
        "rows_skipped": sum(preparation.skipped.values()),
        "train_tokens": preparation.tokens,
        "supervised_tokens": preparation.loss_tokens,
    }


def _read_spec(path: Path) -> dict[str, Any]:
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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
