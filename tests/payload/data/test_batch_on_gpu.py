"""Batches on their way to a GPU."""

import time

import pytest
import torch

from payload.data.batch import Batch, positions_of


@pytest.mark.gpu
def test_a_batch_goes_to_a_gpu_without_waiting_for_what_the_gpu_is_at() -> None:
    documents = torch.zeros(8, 4096, dtype=torch.int32)
    batch = Batch(torch.randint(9, (8, 4096)), documents >= 0, documents, positions_of(documents))
    batch.to(torch.device("cuda"))
    matrix = torch.randn(8192, 8192, device="cuda")
    matrix @ matrix
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(40):
        matrix @ matrix
    there = batch.to(torch.device("cuda"))
    on_the_host_s = time.monotonic() - began
    torch.cuda.synchronize()
    assert time.monotonic() - began > 2 * on_the_host_s
    for sent, got in zip(batch.tensors(), there.tensors(), strict=True):
        assert torch.equal(sent, got.cpu())
