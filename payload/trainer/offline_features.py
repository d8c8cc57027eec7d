"""The features of the whole training set, computed by all targets together before the first step."""

from __future__ import annotations

import time

import torch

from payload.data.feature_cache import (
    Features,
    begin_features,
    is_whole,
    seal_features,
    write_features,
)
from payload.data.prepared import PackedRows
from payload.errors import ToldToStopError
from payload.trainer.preparation import Prepared, feature_shape
from payload.trainer.program import TargetProgram
from payload.trainer.ranks import TELL_EVERY_S, Ranks, StopSignal, say
from payload.trainer.roles import Roles

_BEGUN = "features/begun"


def store_features(
    prepared: Prepared, program: TargetProgram, rows: PackedRows, ranks: Ranks, roles: Roles, stop: StopSignal
) -> None:
    """On every target: compute shards until none is left. The lead returns when the cache is whole.

    Which target computes a shard is decided as they go. Raises ``PayloadError`` when the disk has no room for them, and
    when any rank is told to stop; what was written by then is used by the next run.
    """
    folder = prepared.features
    assert folder is not None
    shape = feature_shape(program, rows)
    lead = ranks.rank == roles.lead_target
    if lead:
        whole = is_whole(folder)
        say(f"features: using {folder}" if whole else begin_features(folder, shape))
        ranks.store.set(_BEGUN, "whole" if whole else "begun")
    ranks.await_keys([_BEGUN], stop)
    if ranks.store.get(_BEGUN) == b"whole":
        return
    told = time.monotonic()

    def wrote(count: int) -> None:
        nonlocal told
        done = ranks.store.add("features/rows", count)
        if lead and (time.monotonic() - told >= TELL_EVERY_S):
            say(f"features: {done} of {shape.rows} rows")
            told = time.monotonic()

    def compute(numbers: range) -> Features:
        parts: list[Features] = []
        for start in range(numbers.start, numbers.stop, rows.batch_size):
            if stop.heed():
                raise ToldToStopError("Told to stop while features were being computed.")
            some = range(start, min(start + rows.batch_size, numbers.stop))
            supply = program.produce(rows.gather(list(some)).to(ranks.device))
            teacher = None if supply.teacher is None else supply.teacher[: len(some)].cpu()
            parts.append((supply.features[: len(some)].cpu(), teacher))
        teachers = [teacher for _, teacher in parts if teacher is not None]
        return torch.cat([features for features, _ in parts]), torch.cat(teachers) if teachers else None

    write_features(folder, shape, lambda: ranks.store.add("features/claimed", 1) - 1, compute, wrote)
    ranks.store.set(_part(ranks.rank), "")
    if lead:
        ranks.await_keys([_part(rank) for rank in roles.targets], stop)
        seal_features(folder, shape)


def _part(rank: int) -> str:
    return f"features/done/{rank}"
