"""The link between two ranks, as training uses it: GB/s of features and of gradients, and what a wait costs.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.link [--json]

Rank 0 sends what a micro-batch of Qwen3-8B's features is (on a CPU: a small part), over the links of
`payload.trainer.transfer`. A receive that is posted before its message comes occupies a part of the GPU: matrix
products are timed alone, beside such a receive, and beside transfers. ``NCCL_MAX_P2P_NCHANNELS`` in the environment
sets how large that part is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.timing import device_name
from payload.trainer.ranks import Ranks, join, leave
from payload.trainer.transfer import Links

_FEATURE_BYTES = 4 * 3072 * 5 * 4096 * 2
_GRADIENT_BYTES = 1_048_626_432 * 4
_SMALL = 64
"""On a CPU, messages and gradients are so many times smaller."""


def measure(ranks: Ranks, repeats: int) -> dict[str, Any]:
    """All figures of this rank; a collective of both."""
    device = ranks.device
    links = Links([(0, 1)])
    links.open(ranks.rank, device)
    small = 1 if device.type == "cuda" else _SMALL
    message = torch.ones(_FEATURE_BYTES // small // 4, device=device)
    gradients = torch.ones(_GRADIENT_BYTES // small // 4, device=device)
    size = 8192 if device.type == "cuda" else 256
    matrix = torch.randn(size, size, device=device).to(
        torch.bfloat16 if device.type == "cuda" else torch.float32
    )

    def post() -> Any:
        return dist.isend(message, 1) if ranks.rank == 0 else dist.irecv(message, 0)

    def transfer() -> None:
        post().wait()

    def product() -> None:
        torch.mm(matrix, matrix)

    def products() -> float:
        return _seconds(device, product, repeats)

    def meet() -> None:
        _wait(device)
        dist.all_reduce(torch.zeros(1))

    transfer()
    dist.all_reduce(gradients)
    products()
    meet()
    transfer_s = _seconds(device, transfer, repeats) / repeats
    meet()
    reduce_s = _seconds(device, lambda: dist.all_reduce(gradients), 3) / 3
    meet()
    alone_s = products()
    meet()
    waiting_s = _beside_a_waiting_receive(ranks, post, products)
    meet()
    sent = [post() for _ in range(4)]
    beside_s = products()
    for handle in sent:
        handle.wait()
    meet()
    return {
        "rank": ranks.rank,
        "device": device_name(device),
        "channels": os.environ.get("NCCL_MAX_P2P_NCHANNELS", "NCCL's own"),
        "link_bytes_per_s": message.nbytes / transfer_s,
        # Two ranks: each sends and receives the whole once, 2 (N - 1) / N of it.
        "all_reduce_bytes_per_s": gradients.nbytes / reduce_s,
        "products_slower_beside_a_waiting_receive": waiting_s / alone_s if waiting_s is not None else None,
        "products_slower_beside_transfers": beside_s / alone_s,
    }


def _beside_a_waiting_receive(
    ranks: Ranks, post: Callable[[], Any], products: Callable[[], float]
) -> float | None:
    """Seconds of the products on rank 1 while it waits for a message that rank 0 sends afterwards; None on rank 0."""
    if ranks.rank == 0:
        dist.all_reduce(torch.zeros(1))
        post().wait()
        return None
    handle = post()
    seconds = products()
    dist.all_reduce(torch.zeros(1))
    handle.wait()
    return seconds


def _seconds(device: torch.device, work: Callable[[], object], repeats: int) -> float:
    """Of work done ``repeats`` times on the current stream; what other streams do is not waited for."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        return time.perf_counter() - began
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(repeats):
        work()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1000


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(found: dict[str, Any]) -> str:
    """The figures as a line for a person."""
    waiting = found["products_slower_beside_a_waiting_receive"]
    beside = "" if waiting is None else f"; products take {waiting:.3f} x beside a receive that waits,"
    return (
        f"rank {found['rank']} on {found['device']}, channels: {found['channels']}: features "
        f"{found['link_bytes_per_s'] / 1e9:.1f} GB/s, all-reduce {found['all_reduce_bytes_per_s'] / 1e9:.1f} GB/s"
        f"{beside} {found['products_slower_beside_transfers']:.3f} x beside transfers"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, in each of the two ranks; rank 1 prints, as only it receives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    # Before CUDA is first asked: each rank sees its own GPU as cuda:0, as in training.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", os.environ["LOCAL_RANK"])
    ranks = join()
    found = measure(ranks, given.repeats)
    if ranks.rank == 1:
        sys.stdout.write((json.dumps(found, indent=1) if given.json else describe(found)) + "\n")
    leave()


if __name__ == "__main__":
    main()
