"""Features on their way: which communicator they take, and how the time they take is told."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from payload.recipe import load_recipe
from payload.trainer import transfer
from payload.trainer.roles import Roles, roles_of
from payload.trainer.stopwatch import Stopwatch
from payload.trainer.transfer import Links


@pytest.fixture
def new_groups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def new_group() -> str:
        made.append(f"group {len(made)}")
        return made[-1]

    monkeypatch.setattr(dist, "new_group", new_group)
    return made


def test_links_of_one_direction_share_the_jobs_own_group(new_groups: list[str]) -> None:
    links = Links(roles_of(load_recipe("qwen3-8b"), 8).links())
    assert new_groups == []
    assert {links.group(producer, consumer) for producer, consumer in links.pairs} == {None}


def test_two_ranks_that_send_to_each_other_never_share_a_group_for_both_directions(
    new_groups: list[str],
) -> None:
    links = Links(Roles((0, 1, 2), (0, 1), 1).links())
    assert (0, 1) in links.pairs
    assert (1, 0) in links.pairs
    assert links.group(0, 1) != links.group(1, 0)
    assert len(new_groups) == 1


def test_all_ranks_open_their_links_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    met: dict[int, list[tuple[int, int]]] = {}

    def between(rank: int):
        def send(tensor: torch.Tensor, peer: int, group: object) -> None:
            met.setdefault(rank, []).append((rank, peer))

        def recv(tensor: torch.Tensor, peer: int, group: object) -> None:
            met.setdefault(rank, []).append((peer, rank))

        return send, recv

    links = Links(Roles((0, 1, 2, 3, 4), (5, 6, 7), 1).links())
    for rank in range(8):
        send, recv = between(rank)
        monkeypatch.setattr(transfer.dist, "send", send)
        monkeypatch.setattr(transfer.dist, "recv", recv)
        links.open(rank, torch.device("cpu"))
    assert len(links.pairs) == 15
    for rank, order in met.items():
        assert order == [pair for pair in links.pairs if rank in pair]


def test_a_stopwatch_adds_up_and_leaves_the_first_out_of_the_mean() -> None:
    watch = Stopwatch(torch.device("cpu"))
    assert watch.seconds == 0
    assert watch.later_mean_s is None
    for pause_s in (0.05, 0.01, 0.01):
        with watch.measured():
            time.sleep(pause_s)
    assert watch.seconds >= 0.07
    assert watch.later_mean_s is not None
    assert watch.later_mean_s >= 0.01
    assert watch.seconds - 2 * watch.later_mean_s >= 0.05


@pytest.mark.gpu
def test_on_a_gpu_a_stopwatch_times_the_stream_and_does_not_wait_for_it() -> None:
    watch = Stopwatch(torch.device("cuda"))
    matrix = torch.randn(8192, 8192, device="cuda")
    matrix @ matrix
    torch.cuda.synchronize()
    began = time.monotonic()
    with watch.measured():
        for _ in range(20):
            matrix @ matrix
    on_the_host_s = time.monotonic() - began
    torch.cuda.synchronize()
    assert watch.seconds > 2 * on_the_host_s
