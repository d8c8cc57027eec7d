"""What only a GPU can show: the deadlock, the kernels and the cache of a GPU."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from payload.agent.protocol import Request
from payload.compile.guard import install, remove
from payload.compile.never_dense import DenseAttentionError, compiled_flex_attention
from payload.compile.race_scenarios import Setting, TinyDrafter
from payload.compile.warmup import warm_up
from payload.recipe import load_recipe
from tests.payload.compile.builders import Heard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SMALL = {
    "target.dtype": "bfloat16",
    "drafter.num_layers": 2,
    "drafter.head_dim": 32,
    "train.batch_size": 2,
    "train.num_anchors": 16,
}


@pytest.fixture
def guard():
    torch._dynamo.reset()
    yield install()
    remove()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("guard_mode", ["off", "on"])
def test_every_race_ends_as_expected(guard_mode):
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "payload.compile.race",
            "--guard",
            guard_mode,
            "--device",
            "cuda",
            "--deadline",
            "120",
        ],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        timeout=580,
        check=False,
    )
    sys.stderr.write(ended.stderr.decode() + ended.stdout.decode())
    assert ended.returncode == 0


@pytest.mark.timeout(300)
def test_three_threads_train_from_a_cold_cache_and_lose_nothing_to_one_after_the_other(guard):
    def losses(drafter, barrier=None):
        with guard.first_step():
            found = [drafter.step()]
        if barrier is not None:
            barrier.wait(200)
        for _ in range(4):
            with guard.steady():
                found.append(drafter.step())
        return found

    setting = Setting(guard, "cuda", 3)
    drafters = [TinyDrafter(index, setting) for index in range(3)]
    together = {}
    barrier = threading.Barrier(3, action=guard.seal)
    threads = [
        threading.Thread(target=lambda i=i: together.update({i: losses(drafters[i], barrier)}), daemon=True)
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(280)
    guard.unseal()
    assert sorted(together) == [0, 1, 2]
    for index in range(3):
        assert together[index] == pytest.approx(losses(TinyDrafter(index, setting)), rel=1e-4)


def test_an_uncompiled_call_raises_before_its_scores_are_allocated(guard):
    from torch.nn.attention.flex_attention import flex_attention

    query = torch.zeros(1, 1, 1 << 20, 16, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with pytest.raises(DenseAttentionError, match=r"4398\.0 GB"):
        flex_attention(query, query, query)
    assert torch.cuda.max_memory_allocated() - before < 1 << 28


@pytest.mark.timeout(300)
def test_the_backward_pass_of_training_goes_through_the_compiled_kernels(guard):
    drafter = TinyDrafter(0, Setting(guard, "cuda", 1))
    with guard.first_step():
        first = drafter.step()
    guard.seal()
    with guard.steady():
        second = drafter.step()
    assert second < first


@pytest.mark.timeout(300)
def test_attention_called_by_itself_is_compiled_forward_and_backward(guard):
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, None, 256, 256, device="cuda")
    query, key, value = (torch.randn(1, 2, 256, 64, device="cuda", requires_grad=True) for _ in range(3))
    out = compiled_flex_attention(query, key, value, mask)
    out.square().sum().backward()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.allclose(out, expected, atol=2e-2)
    assert query.grad is not None
    assert torch.isfinite(query.grad).all()


@pytest.mark.timeout(600)
def test_a_warmed_cache_is_carried_to_another_container(tmp_path):
    recipe = load_recipe("tiny-cpu", SMALL).to_dict()

    def warm(name, **fields):
        root = tmp_path / name / "dflash"
        return warm_up(Request("n", str(root), {"recipe": recipe, "device": "cuda", **fields}), Heard())

    first = warm("one")
    assert (first["source"], first["misses"]) == ("compiled", 0)
    assert "flex_attention, compiled to Triton kernels" in first["attention"]
    carried = warm("two", artifact=first["artifact"]["path"])
    assert (carried["source"], carried["misses"]) == ("artifact", 0)
