"""The network against formulations that share no code with it."""

import math

import pytest
import torch
from torch import Tensor

from payload.drafter.attention import attend, kernel_for
from payload.drafter.config import FULL, SLIDING, DrafterConfig, block_is_causal, layer_window
from payload.drafter.model import DFlashDrafter, RMSNorm, reference_hidden
from payload.drafter.step import block_inputs
from tests.payload.drafter.builders import VOCABULARY, anchors_of, random_batch, seeded, tiny_config

RULES = [
    {},
    {"layer_types": (SLIDING, FULL), "sliding_window": 5},
    {"layer_types": (SLIDING, SLIDING), "sliding_window": 3, "causal": False},
    {"causal": True},
]


def _drafter(config: DrafterConfig, seed: int = 0) -> DFlashDrafter:
    torch.manual_seed(seed)
    drafter = DFlashDrafter(config).double()
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    return drafter


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """``x[L, D]`` as D / 2 complex numbers, each turned by its own angle."""
    half = x.shape[-1] // 2
    frequency = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float32)
    angle = (positions[:, None].float() * frequency).double()
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def _one_block(
    state: dict[str, Tensor], config: DrafterConfig, features: Tensor, block: Tensor, start: int
) -> Tensor:
    """One block after ``features[T, n*H]``, head by head, as it is drafted when decoding; block at ``start``."""
    context = _norm(features @ state["fc.weight"].T, state["hidden_norm.weight"], config.rms_norm_eps)
    own, seen, eps = torch.arange(len(block)), len(context), config.rms_norm_eps
    positions = torch.cat([torch.arange(start - seen, start), start + own])
    hidden = block
    for index, kind in enumerate(config.layer_types):
        at = {name.removeprefix(f"layers.{index}."): value for name, value in state.items()}
        normed = _norm(hidden, at["input_layernorm.weight"], eps)
        source = torch.cat([context, normed])
        causal, window = block_is_causal(kind, config), layer_window(kind, config)
        heads = []
        for head in range(config.num_attention_heads):
            rows = slice(head * config.head_dim, (head + 1) * config.head_dim)
            group = head // (config.num_attention_heads // config.num_key_value_heads)
            shared = slice(group * config.head_dim, (group + 1) * config.head_dim)
            query = _norm(normed @ at["self_attn.q_proj.weight"][rows].T, at["self_attn.q_norm.weight"], eps)
            key = _norm(source @ at["self_attn.k_proj.weight"][shared].T, at["self_attn.k_norm.weight"], eps)
            value = source @ at["self_attn.v_proj.weight"][shared].T
            query = _rope(query, positions[seen:], config.rope_theta)
            key = _rope(key, positions, config.rope_theta)
            scores = query @ key.T / math.sqrt(config.head_dim)
            distance = (seen + own)[:, None] - torch.arange(len(source))
            hidden_pairs = torch.zeros_like(scores, dtype=torch.bool)
            if causal:
                hidden_pairs |= distance < 0
            if window is not None:
                hidden_pairs |= distance.abs() >= window
            heads.append(scores.masked_fill(hidden_pairs, -math.inf).softmax(-1) @ value)
        hidden = hidden + torch.cat(heads, dim=-1) @ at["self_attn.o_proj.weight"].T
        normed = _norm(hidden, at["post_attention_layernorm.weight"], eps)
        gate = normed @ at["mlp.gate_proj.weight"].T
        up = normed @ at["mlp.up_proj.weight"].T
        hidden = hidden + (gate * gate.sigmoid() * up) @ at["mlp.down_proj.weight"].T
    return _norm(hidden, state["norm.weight"], eps)


@pytest.mark.parametrize("rule", RULES)
def test_all_blocks_at_once_equal_each_block_drafted_alone(rule):
    config = tiny_config(**rule)
    drafter = _drafter(config)
    batch = random_batch(seed=5, rows=2, length=20, documents=2)
    anchors = anchors_of(batch, 4)
    features = torch.randn(2, 20, 32, dtype=torch.float64)
    embedding = torch.randn(VOCABULARY, 16, dtype=torch.float64)
    inputs = block_inputs(config, embedding, batch, anchors, torch.float64, "dense")
    hidden = drafter(features, inputs.embeddings, inputs.rotary, inputs.masks)
    checked = 0
    for row in range(2):
        for block, anchor in enumerate(anchors.positions[row].tolist()):
            if not anchors.valid[row, block]:
                continue
            start = int(batch.position_ids[row, anchor])
            tokens = torch.tensor([int(batch.input_ids[row, anchor]), *[config.mask_token_id] * 3])
            alone = _one_block(
                drafter.state_dict(), config, features[row, anchor - start : anchor], embedding[tokens], start
            )
            torch.testing.assert_close(hidden[row, block], alone[1:], rtol=1e-5, atol=1e-6)
            checked += 1
    assert checked >= 4


@pytest.mark.parametrize("rule", [*RULES, {"num_layers": 1}, {"num_layers": 3}])
def test_work_left_out_changes_neither_hidden_states_nor_gradients(rule):
    config = tiny_config(**rule)
    drafter = _drafter(config)
    batch = random_batch(seed=8)
    features = torch.randn(2, 24, 32, dtype=torch.float64)
    embedding = torch.randn(VOCABULARY, 16, dtype=torch.float64)
    inputs = block_inputs(config, embedding, batch, anchors_of(batch, 5), torch.float64, "dense")
    arguments = (features, inputs.embeddings, inputs.rotary, inputs.masks)
    results = []
    for hidden in (drafter(*arguments), reference_hidden(drafter, *arguments)):
        drafter.zero_grad()
        hidden.backward(torch.randn(hidden.shape, generator=seeded(1), dtype=torch.float64))
        results.append([hidden.detach(), *(parameter.grad for parameter in drafter.parameters())])
    assert results[0][0].shape == (2, 5, 3, 16)
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("rule", RULES)
def test_drafting_from_the_cache_equals_training(rule):
    """The context comes in uneven pieces, as accepted tokens do."""
    config = tiny_config(**rule)
    drafter = _drafter(config)
    features = torch.randn(1, 11, 32, dtype=torch.float64)
    block = torch.randn(1, 4, 16, dtype=torch.float64)
    positions = torch.arange(15)[None]
    cache = drafter.new_cache(1, 11, torch.device("cpu"), torch.float64)
    for start, end in ((0, 5), (5, 6), (6, 11)):
        drafter.extend_context(features[:, start:end], positions[:, start:end], cache)
    drafted = drafter.draft(block, positions[:, 11:], cache)
    alone = _one_block(drafter.state_dict(), config, features[0], block[0], 11)
    torch.testing.assert_close(drafted[0], alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(drafter.draft(block, positions[:, 11:], cache), drafted, rtol=0, atol=0)


def test_a_causal_drafter_without_context_is_a_qwen3_decoder():
    from transformers import Qwen3Config, Qwen3Model

    config = tiny_config(causal=True, block_size=6)
    drafter = _drafter(config).float()
    theirs = Qwen3Model(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
    ).eval()
    own = {k: v for k, v in drafter.state_dict().items() if k not in ("fc.weight", "hidden_norm.weight")}
    report = theirs.load_state_dict(own, strict=False)
    assert report.unexpected_keys == []
    assert report.missing_keys == ["embed_tokens.weight"]
    block = torch.randn(2, 6, 16)
    cache = drafter.new_cache(2, 0, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        expected = theirs(inputs_embeds=block).last_hidden_state
        drafted = drafter.draft(block, torch.arange(6).expand(2, -1), cache)
    torch.testing.assert_close(drafted, expected, rtol=1e-4, atol=1e-5)


def test_a_drafter_of_five_layers_has_the_58_tensors_of_its_format():
    names = set(DFlashDrafter(tiny_config(num_layers=5)).state_dict())
    assert len(names) == 58
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.4.self_attn.k_norm.weight"} <= names
    assert not any("rotary" in name or "embed" in name or "lm_head" in name for name in names)


def test_fp32_parameters_compute_in_the_dtype_of_the_activations_and_learn_in_fp32():
    config = tiny_config()
    drafter = DFlashDrafter(config)
    batch = random_batch(seed=6)
    inputs = block_inputs(
        config, torch.randn(VOCABULARY, 16), batch, anchors_of(batch, 3), torch.bfloat16, "dense"
    )
    features = torch.randn(2, 24, 32).bfloat16()
    hidden = drafter(features, inputs.embeddings, inputs.rotary, inputs.masks)
    assert hidden.dtype == torch.bfloat16
    hidden.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in drafter.parameters())


def test_norms_are_computed_in_fp32():
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # its square overflows float16
    assert torch.equal(RMSNorm(4, 1e-6)(x), torch.ones(1, 4, dtype=torch.float16))


def test_training_uses_flex_attention_on_cuda_and_the_dense_mask_elsewhere():
    assert kernel_for("cuda:0") == "flex"
    assert kernel_for("cpu") == "dense"


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_grouped_heads_equal_repeated_keys(kv_heads):
    query = torch.randn(2, 4, 5, 8)
    key, value = torch.randn(2, 2, kv_heads, 7, 8).unbind(0)
    mask = torch.rand(2, 1, 5, 7) < 0.6
    mask[..., 0] = True
    repeat = 4 // kv_heads
    key_each, value_each = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = (query @ key_each.transpose(2, 3) / math.sqrt(8)).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(attend(query, key, value, mask), scores.softmax(-1) @ value_each)
