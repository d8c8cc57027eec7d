"""What the lead target brings about before the first step: the target itself and the packed training set."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from payload.agent.layout import Layout
from payload.data.answers import read_answers
from payload.data.feature_cache import FORMAT, FeatureShape, shape_of
from payload.data.kept import Kept, ensure_prepared
from payload.data.prepared import PackedRows, Preparation
from payload.data.regenerate import prompt_keys
from payload.data.rows import Row, read_rows
from payload.data.tokens import load_tokenizer
from payload.demo.target import ensure_demo_target
from payload.drafter.config import DrafterConfig
from payload.errors import PayloadError, ToldToStopError
from payload.recipe import Recipe, TargetSpec
from payload.target import Target
from payload.trainer.answering import generation_settings
from payload.trainer.heldout import HeldOut, held_out_prompts
from payload.trainer.initial import find_initial
from payload.trainer.program import TargetProgram, compiles_target, drafter_config_for
from payload.trainer.ranks import TELL_EVERY_S, StopSignal, say


@dataclass(frozen=True)
class Opened:
    """The target as the lead target found or made it, which the other targets load. ``answers``: the file of the
    answers that the target is to give to the training prompts itself, when the recipe asks for them."""

    target: TargetSpec
    config: DrafterConfig
    weights_sha256: str
    """Of a sample of the target's weights (`weights_digest`)."""
    answers: Path | None


@dataclass(frozen=True)
class Prepared:
    """What the lead target found out and every rank needs. ``packed`` is the training set's file."""

    target: TargetSpec
    packed: Path
    data_sha256: str
    data_facts: dict[str, Any]
    weights_sha256: str
    config: DrafterConfig
    dtype: torch.dtype
    tied: bool
    features: Path | None
    """Where the offline feature cache is or is to be, when the recipe asks for one."""


def open_target(
    recipe: Recipe, root: Path, device: torch.device, stop: StopSignal, begins: bool
) -> tuple[Opened, Target, HeldOut]:
    """Bring about the target, on the lead target; what is there already is used again. With the held-out prompts.

    ``begins``: there is no checkpoint to go on from, so that the recipe's initial drafter must be there. Raises
    ``PayloadError`` for that, and for what else can be known before hours go into answers and features.
    """
    spec = recipe.target
    if spec.model == "demo":
        spec = replace(spec, model=str(ensure_demo_target(root, say, lambda: stop.received)))
    target = Target.load(spec, device, compiles_target(recipe, device))
    tokenizer = load_tokenizer(spec)
    config = drafter_config_for(recipe, target.config, tokenizer.mask_token_id)
    ends = target.model.generation_config
    held_out = held_out_prompts(recipe, tokenizer, ends, say, lambda: stop.received)
    if begins and recipe.train.from_pretrained is not None:
        find_initial(recipe.train.from_pretrained, config, lambda line: None)
    weights_sha256 = weights_digest(target.model)
    answers = _answers_file(recipe, spec, weights_sha256, root) if recipe.data.regenerate else None
    return Opened(spec, config, weights_sha256, answers), target, held_out


def prepare_run(recipe: Recipe, opened: Opened, target: Target, root: Path, stop: StopSignal) -> Prepared:
    """Bring about the training set, on the lead target, once all answers are there."""
    data, config = recipe.data, opened.config

    def rows() -> Iterator[Row]:
        found: Iterable[Row] = read_rows(data.train, "train", data.train_rows, recipe.train.seed)
        if opened.answers is not None:
            found = read_answers(opened.answers, prompt_keys(found))
        return until_stopped(found, stop)

    tokenizer = load_tokenizer(opened.target)
    with a_stop_is_no_failure(stop):
        kept = ensure_prepared(rows, tokenizer, data.max_length, data.min_loss_tokens, Layout(root).packed)
    if kept.was_there:
        say(f"data: using {kept.path.parent}")
    for line in kept.preparation.describe():
        say(line)
    program = TargetProgram(target, config.target_layer_ids, recipe.loss.kind == "kl")
    features = None
    if data.features == "offline":
        features = _features_folder(recipe, program, kept, opened.weights_sha256, root)
    return Prepared(
        target=opened.target,
        packed=kept.path,
        data_sha256=kept.sha256,
        data_facts=_facts(recipe, kept.preparation),
        weights_sha256=opened.weights_sha256,
        config=config,
        dtype=target.dtype,
        tied=target.head_weight is target.embedding_weight,
        features=features,
    )


def _answers_file(recipe: Recipe, spec: TargetSpec, weights_sha256: str, root: Path) -> Path:
    asked = [list(recipe.data.train), recipe.data.train_rows, vars(generation_settings(recipe))]
    key = json.dumps([vars(spec), weights_sha256, *asked], sort_keys=True)
    return Layout(root).answers / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl"


@contextmanager
def a_stop_is_no_failure(stop: StopSignal) -> Iterator[None]:
    """What fails once the job is told to stop is that stop: it may have ended a process that encodes as well."""
    try:
        yield
    except PayloadError as error:
        if stop.received:
            raise ToldToStopError("Told to stop while the data were being prepared.") from error
        raise


def until_stopped(rows: Iterable[Row], stop: StopSignal) -> Iterator[Row]:
    """The rows, with a line now and then of how many they were: to read or encode all of them can take long.

    Raises ``ToldToStopError`` in between once the job is told to stop.
    """
    told = time.monotonic()
    for number, row in enumerate(rows):
        if stop.received:
            raise ToldToStopError("Told to stop while the data were being prepared.")
        if time.monotonic() - told >= TELL_EVERY_S:
            say(f"data: {number:,} rows so far")
            told = time.monotonic()
        yield row


def feature_shape(program: TargetProgram, rows: PackedRows) -> FeatureShape:
    """What the features of the packed rows are."""
    hidden_size = program.target.config.hidden_size
    return shape_of(
        rows=rows.rows,
        length=rows.row_length,
        features=len(program.layer_ids) * hidden_size,
        teacher=hidden_size if program.with_teacher else 0,
        dtype=str(program.target.dtype).removeprefix("torch."),
    )


def _features_folder(
    recipe: Recipe, program: TargetProgram, kept: Kept, weights_sha256: str, root: Path
) -> Path:
    """Its name is a hash of the data, the target and the layers."""
    shape = feature_shape(program, PackedRows(kept.path, recipe.train.batch_size, recipe.train.seed))
    whose = [vars(recipe.target), weights_sha256]
    key = [FORMAT, kept.sha256, *whose, list(program.layer_ids), vars(shape)]
    return Layout(root).features / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def weights_digest(model: nn.Module) -> str:
    """A hash of 64 values of each parameter: other weights in the same folder are another target."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 64)].cpu().contiguous()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} ".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _facts(recipe: Recipe, preparation: Preparation) -> dict[str, Any]:
    return {
        "sources": ", ".join(recipe.data.train),
        "answers_regenerated": recipe.data.regenerate,
        "documents": preparation.documents,
        "rows_skipped": sum(preparation.skipped.values()),
        "train_tokens": preparation.tokens,
        "supervised_tokens": preparation.loss_tokens,
    }
