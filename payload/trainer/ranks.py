"""This process among the others: device, process groups, and the store over which decisions travel."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from payload.errors import ToldToStopError

TIMEOUT = timedelta(minutes=60)
"""Long enough for a model to be compiled and held-out prompts to be decoded while the other ranks wait."""

_LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class Ranks:
    """``store`` is shared by all ranks of the job."""

    rank: int
    world_size: int
    device: torch.device
    store: dist.Store

    def broadcast_object(self, value: Any, source: int) -> Any:
        """The source's value, on every rank. A collective of all ranks."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
        return box[0]

    def hand_out(self, name: str, value: Any, source: int, stop: StopSignal) -> Any:
        """The source's value, on every rank, however long the others wait; it goes through the store, as ``name``.

        Raises ``PayloadError`` when any rank is told to stop meanwhile.
        """
        if self.world_size == 1:
            return value
        if self.rank == source:
            self.store.set(name, pickle.dumps(value))  # type: ignore[arg-type]
            return value
        self.await_keys([name], stop)
        return pickle.loads(self.store.get(name))

    def await_keys(self, names: list[str], stop: StopSignal) -> None:
        """Wait until all of ``names`` are in the store. No collective: none has a limit that work of hours would keep.

        Raises ``PayloadError`` when any rank is told to stop.
        """
        while not self.store.check(names):
            if stop.heed():
                raise ToldToStopError("Told to stop while waiting for what another rank prepares.")
            time.sleep(_LOOK_EVERY_S)


def join(device: torch.device | None = None) -> Ranks:
    """Join the job that torchrun described in the environment; alone when there is none."""
    device = device or torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        store: dist.Store = dist.HashStore()
        dist.init_process_group("gloo", store=dist.PrefixStore("groups", store), rank=0, world_size=1)
        return Ranks(0, 1, device, store)
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=TIMEOUT)))
    store.set_timeout(TIMEOUT)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("groups", store),
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    return Ranks(rank, world_size, device, dist.PrefixStore("control", store))


def subgroup(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A process group of some ranks; None when it would have one member. To be called by all ranks in one order."""
    members = sorted(set(ranks))
    if dist.get_world_size() == 1:
        return None
    # The group is made even for one member: all ranks must make the same calls.
    group = dist.new_group(members, timeout=TIMEOUT)
    return group if len(members) > 1 else None


def leave() -> None:
    """Leave the job in good order."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Pace:
    """How far the run goes, decided by the lead drafter and known to all in time.

    The lead announces after each step which step is the last. Targets read the announcement of step s before they
    produce step s + ``window``: so they are never more than ``window`` steps ahead, and a stop decided after step s
    takes effect after step s + ``window``, when nothing is on its way any more.
    """

    def __init__(self, store: dist.Store, first_step: int, last_step: int, window: int) -> None:
        self._store = store
        self._first = first_step
        self.last_step = last_step
        self.window = window
        self._ending = False

    def announce(self, step: int) -> None:
        """On the lead drafter, after ``step``: let the targets go on."""
        self._store.set(f"go/{step}", str(self.last_step))

    def await_turn(self, step: int) -> bool:
        """On a target: wait until ``step`` may be produced; false when the run ends before it."""
        allowed_by = step - self.window
        if allowed_by >= self._first:
            self.last_step = int(self._store.get(f"go/{allowed_by}"))
        return step <= self.last_step

    def end_soon(self, step: int) -> bool:
        """On the lead drafter, after ``step`` and before it is announced: end the run as early as all can know.

        True when that moves the end.
        """
        sooner = step + self.window < self.last_step and not self._ending
        if sooner:
            self.last_step = step + self.window
            self._ending = True
        return sooner


class StopSignal:
    """SIGTERM, remembered here and told to the lead drafter through the store."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._received = threading.Event()
        self._told = False
        self._look_again = 0.0

    def install(self) -> None:
        """Take over SIGTERM in this process."""
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.set()

    @property
    def received(self) -> bool:
        """Whether this process was told to stop. The first time, the other ranks are told."""
        if self._received.is_set() and not self._told:
            self._told = True
            self._store.set("stop", "1")
        return self._received.is_set()

    def heed(self) -> bool:
        """Whether any rank was told to stop, asked at most every fifth of a second; this one then counts as told too.

        For work before the first step, which a rank leaves by itself.
        """
        if not self.received and time.monotonic() >= self._look_again:
            self._look_again = time.monotonic() + _LOOK_EVERY_S
            if self._store.check(["stop"]):
                self._received.set()
        return self.received

    def anywhere(self) -> bool:
        """Whether any rank was told to stop: one question to the store."""
        return self.received or bool(self._store.check(["stop"]))


TELL_EVERY_S = 30.0
"""How often work of unknown length says how far it is."""


def say(line: str) -> None:
    """A line for the person who reads the run's log."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
