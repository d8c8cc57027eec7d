"""The races of torch.compile between threads, each staged in a process of its own.

Run by race.py as ``python -m payload.compile.race_scenarios SCENARIO GUARD DEVICE THREADS DEADLINE_S FOLDER``; the
outcome is written to ``FOLDER/outcome.json``, or by the watchdog to ``FOLDER/hung.json``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from payload.compile.guard import Guard, install
from payload.compile.watchdog import lock_owner, watch
from payload.drafter.anchors import Anchors, sample_anchors
from payload.drafter.config import DrafterConfig
from payload.drafter.loss import LossConfig
from payload.drafter.model import DFlashDrafter
from payload.drafter.step import drafter_loss

STEPS = 3
# Equal graphs on equal inputs; what remains is the order of additions in atomic updates on a GPU.
RELATIVE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Setting:
    """How a scenario is run; ``guard`` is None on stock torch."""

    guard: Guard | None
    device: str
    threads: int


class Diverged(Exception):
    """The threads trained, but not to the losses that they reach one after the other."""


def traced_call(setting: Setting) -> str:
    """A thread is inside a trace while another calls a function that was compiled before."""
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    x = torch.ones(4, device=setting.device)
    compiled(x)
    _while_another_thread_traces(lambda: compiled(x))
    return "a compiled call during another thread's trace returned"


def traced_module(setting: Setting) -> str:
    """A thread is inside a trace while another calls a module that has nothing to do with it."""
    module = nn.Linear(4, 4, device=setting.device)
    x = torch.ones(4, device=setting.device)
    _while_another_thread_traces(lambda: module(x))
    return "a module call during another thread's trace returned"


def cold_threads(setting: Setting) -> str:
    """Threads with a drafter each compile forward and backward at once, from a cold cache, and train."""
    drafters = [TinyDrafter(index, setting) for index in range(setting.threads)]
    together: list[list[float]] = [[] for _ in drafters]
    all_made_first_step = threading.Barrier(
        setting.threads, action=setting.guard.seal if setting.guard else None
    )

    def train(index: int) -> None:
        for step in range(STEPS):
            with _step_context(setting.guard, first=step == 0):
                together[index].append(drafters[index].step())
            if step == 0:
                all_made_first_step.wait()

    _run_threads([partial(train, index) for index in range(setting.threads)], all_made_first_step)
    if setting.guard is not None:
        setting.guard.unseal()
    for index, losses in enumerate(together):
        drafter = TinyDrafter(index, setting)
        alone = [drafter.step() for _ in range(STEPS)]
        if any(abs(a - b) > RELATIVE_TOLERANCE * abs(b) for a, b in zip(losses, alone, strict=True)):
            raise Diverged(f"thread {index} reached {losses}, alone it reaches {alone}")
    return (
        f"{setting.threads} threads made {STEPS} steps, with the losses that they reach one after the other"
    )


def lazy_backward(setting: Setting) -> str:
    """One thread's first backward runs while another compiles its forward.

    On a GPU all backward passes run in the device's one autograd thread. If that thread must compile, it waits for
    the lock that the other thread holds, which, tracing flex_attention's joint graph, waits for the autograd thread.

    A CUDA build of torch 2.11 on a machine without a GPU dies here, guarded or not: each compilation swaps the device
    guard that a running backward pass uses (``FakeTensorMode.__enter__``). CPU builds and GPU machines do not.
    """
    from torch._dynamo import convert_frame

    # Another number of anchors makes another graph, so that the second thread has something to compile.
    first, second = TinyDrafter(0, setting), TinyDrafter(1, setting, num_anchors=TinyDrafter.NUM_ANCHORS * 2)
    forward_done = threading.Event()
    compiler = threading.Thread(name="compiles its forward", target=lambda: None)
    failures: list[BaseException] = []

    def compile_forward() -> None:
        forward_done.wait()
        with _step_context(setting.guard, first=True):
            second.step()

    def run_backward() -> None:
        with _step_context(setting.guard, first=True):
            loss = first.forward()
        forward_done.set()
        while compiler.is_alive() and lock_owner(convert_frame.compile_lock) != compiler.ident:
            time.sleep(0.001)
        loss.backward()

    compiler = threading.Thread(
        name="compiles its forward", target=_collecting, args=(compile_forward, failures), daemon=True
    )
    compiler.start()
    _run_threads([run_backward], name="runs its first backward", on_failure=forward_done.set)
    compiler.join()
    if failures:
        raise failures[0]
    return "a first backward ran while another thread compiled"


SCENARIOS: dict[str, Callable[[Setting], str]] = {
    "traced-call": traced_call,
    "traced-module": traced_module,
    "cold-threads": cold_threads,
    "lazy-backward": lazy_backward,
}


class TinyDrafter:
    """A drafter of one small layer, compiled as training compiles it, with its data and optimizer.

    Everything follows from ``index``: two of the same index make the same steps.
    """

    NUM_ANCHORS = 8
    ROWS, LENGTH = 2, 128
    CONFIG = DrafterConfig(
        hidden_size=64,
        intermediate_size=128,
        num_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=128,
        block_size=16,
        mask_token_id=0,
        target_layer_ids=(1,),
        num_target_layers=4,
    )

    def __init__(self, index: int, setting: Setting, num_anchors: int = NUM_ANCHORS) -> None:
        self.device = _device(setting.device, index)
        torch.manual_seed(index)
        self.drafter = DFlashDrafter(self.CONFIG).to(self.device)
        self.drafter.compile(dynamic=False, fullgraph=True)
        self.optimizer = torch.optim.SGD(self.drafter.parameters(), lr=0.1)
        self.weights = torch.randn(self.CONFIG.vocab_size, self.CONFIG.hidden_size).to(self.device)
        self.features = torch.randn(self.ROWS, self.LENGTH, self.CONFIG.hidden_size).to(self.device)
        rows = (self.ROWS, self.LENGTH)
        self.batch = SimpleNamespace(
            input_ids=torch.randint(self.CONFIG.vocab_size, rows).to(self.device),
            loss_mask=torch.ones(rows, dtype=torch.bool, device=self.device),
            document_ids=torch.zeros(rows, dtype=torch.int32, device=self.device),
            position_ids=torch.arange(self.LENGTH, device=self.device).expand(rows).contiguous(),
        )
        generator = torch.Generator(self.device).manual_seed(index)
        self.anchors: Anchors = sample_anchors(
            self.batch.loss_mask, self.batch.document_ids, num_anchors, generator
        )

    def forward(self) -> Tensor:
        """The mean loss, a scalar with a graph."""
        output = drafter_loss(
            self.drafter, self.weights, self.weights, self.batch, self.features, self.anchors, LossConfig()
        )
        return output.loss_sum / output.weight_sum

    def step(self) -> float:
        """One optimizer step; returns its loss."""
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def _device(kind: str, index: int) -> torch.device:
    if kind == "cuda":
        return torch.device("cuda", index % torch.cuda.device_count())
    return torch.device(kind)


def _step_context(guard: Guard | None, first: bool) -> Any:
    if guard is None:
        return nullcontext()
    return guard.first_step() if first else guard.steady()


def _while_another_thread_traces(act: Callable[[], Any]) -> None:
    inside, done = threading.Event(), threading.Event()

    def traced(y: Tensor) -> Tensor:
        inside.set()
        done.wait()
        return y * 2

    tracer = threading.Thread(name="traces", target=torch.fx.symbolic_trace, args=(traced,), daemon=True)
    tracer.start()
    inside.wait()
    try:
        act()
    finally:
        done.set()
        tracer.join()


def _run_threads(
    works: list[Callable[[], None]],
    barrier: threading.Barrier | None = None,
    name: str = "trains",
    on_failure: Callable[[], None] | None = None,
) -> None:
    """Run each in a thread of its own and raise the first failure that is not another's consequence."""
    failures: list[BaseException] = []

    def work_or_release(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            if barrier is not None:
                barrier.abort()
            if on_failure is not None:
                on_failure()
            raise

    threads = [
        threading.Thread(
            name=f"{name} ({index})",
            target=_collecting,
            args=(partial(work_or_release, work), failures),
            daemon=True,
        )
        for index, work in enumerate(works)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    causes = [failure for failure in failures if not isinstance(failure, threading.BrokenBarrierError)]
    if causes:
        raise causes[0]


def _collecting(work: Callable[[], None], failures: list[BaseException]) -> None:
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for this one
        failures.append(error)


def main(scenario: str, guard: str, device: str, threads: str, deadline_s: str, folder: str) -> int:
    """Run one scenario and write its outcome."""
    timer = watch(float(deadline_s), Path(folder, "hung.json"))
    try:
        setting = Setting(install() if guard == "on" else None, device, int(threads))
        outcome = {"outcome": "passed", "detail": SCENARIOS[scenario](setting)}
    except Diverged as error:
        outcome = {"outcome": "diverged", "detail": str(error)}
    except Exception as error:  # noqa: BLE001 - what a race raises is what this program is to find out
        traceback.print_exc()
        outcome = {
            "outcome": "raised",
            "detail": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
        }
    timer.cancel()
    Path(folder, "outcome.json").write_text(json.dumps(outcome), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
