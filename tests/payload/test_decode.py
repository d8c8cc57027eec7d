import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from payload.acceptance import Acceptance, evaluate
from payload.data.batch import Batch
from payload.decode import accept_greedy, accept_sampled, plain_decode, speculative_decode
from payload.drafter.anchors import sample_anchors
from payload.drafter.config import FULL, SLIDING, DrafterConfig
from payload.drafter.loss import LossConfig, simulated_accepted_length
from payload.drafter.model import DFlashDrafter
from payload.drafter.step import drafter_loss
from payload.errors import PayloadError
from payload.target import Target
from tests.payload.tiny_targets import FAMILIES, tiny_target

RULES = [
    {},
    {"layer_types": (SLIDING, FULL), "sliding_window": 6},
    {"layer_types": (SLIDING, SLIDING), "sliding_window": 3, "causal": False},
]


def _drafter(target: Target, seed: int = 0, block_size: int = 5, **changes) -> DFlashDrafter:
    torch.manual_seed(seed)
    config = DrafterConfig.for_target(
        target.config,
        mask_token_id=target.config.vocab_size - 1,
        num_layers=2,
        block_size=block_size,
        **changes,
    )
    return DFlashDrafter(config).double()


def _taught(
    target: Target, prompts: list[list[int]], length: int, steps: int, **changes
) -> tuple[DFlashDrafter, float]:
    """A drafter that learned the target's own greedy answers, and its simulated accepted length on them."""
    drafter = _drafter(target, **changes)
    rows = [prompt + plain_decode(target, prompt, length - len(prompt)) for prompt in prompts]
    ids = torch.tensor(rows)
    answers = torch.arange(length) >= torch.tensor([len(prompt) for prompt in prompts])[:, None]
    batch = Batch(ids, answers, torch.zeros_like(ids).int(), torch.arange(length).expand_as(ids))
    features = target.features(ids, drafter.config.target_layer_ids)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.01, weight_decay=0.0)
    for _ in range(steps):
        anchors = sample_anchors(answers, batch.document_ids, 16, generator)
        loss = drafter_loss(
            drafter, target.head_weight, target.embedding_weight, batch, features, anchors, LossConfig()
        )
        optimizer.zero_grad()
        (loss.loss_sum / loss.weight_sum).backward()
        optimizer.step()
    return drafter, simulated_accepted_length(loss.accepted_by_position, loss.count_by_position).item()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", RULES)
def test_greedy_text_is_the_targets_own_token_for_token(family, rule):
    target = tiny_target(family, num_hidden_layers=5)
    drafter, _ = _taught(target, [[1, 2, 3], [7, 8, 9]], length=30, steps=40, **rule)
    gained = set()
    for prompt in ([1, 2, 3], [7], [9, 8, 7, 6, 5, 4]):
        decoded = speculative_decode(target, drafter, prompt, 30)
        assert decoded.tokens == plain_decode(target, prompt, 30)
        gained |= set(decoded.accepted_lengths)
    assert min(gained) == 1
    assert max(gained) >= 4


def test_greedy_text_is_what_transformers_generates():
    target = tiny_target()
    prompt = [3, 1, 4, 1, 5]
    theirs = target.model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, 5:].tolist()
    assert plain_decode(target, prompt, 20) == theirs
    assert speculative_decode(target, _drafter(target), prompt, 20).tokens == theirs


def test_a_drafter_taught_on_the_targets_answers_is_accepted_when_serving_as_in_training():
    """Training and decoding agree on positions, masks, features and labels, or this would be near 1."""
    target = tiny_target()
    prompts = [[1, 2, 3], [7, 8], [20, 30, 5, 9]]
    drafter, simulated = _taught(target, prompts, length=40, steps=150)
    result = evaluate(target, drafter, prompts, 36)
    assert simulated > 4.5
    assert result.mean_accepted_length > 4
    assert result.identical == len(prompts)
    assert result.target_forwards < result.tokens / 3


@settings(deadline=None, max_examples=15)
@given(
    length=st.integers(1, 14),
    prompt=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    seed=st.integers(0, 3),
)
def test_exactly_as_many_tokens_come_as_were_asked_for(length, prompt, seed):
    target = tiny_target(vocab_size=8, seed=seed)
    decoded = speculative_decode(target, _drafter(target, seed), prompt, length)
    assert len(decoded.tokens) == length
    assert sum(decoded.accepted_lengths) == length - 1, "the first token is the prompt's own forward"
    for gained, accepted, verified in zip(
        decoded.accepted_lengths, decoded.accepted_drafts, decoded.verified_drafts, strict=True
    ):
        assert gained == accepted + 1
        assert accepted <= verified <= 4


def test_decoding_ends_with_the_first_end_of_text_token():
    target = tiny_target(num_hidden_layers=5)
    drafter, _ = _taught(target, [[1, 2, 3]], length=30, steps=60)
    for prompt in ([1, 2, 3], [6]):
        whole = plain_decode(target, prompt, 20)
        for eos in (*dict.fromkeys(whole[:8]), 39):
            expected = whole[: whole.index(eos) + 1] if eos in whole else whole
            decoded = speculative_decode(target, drafter, prompt, 20, eos_token_ids=(eos,))
            assert decoded.tokens == expected
            assert plain_decode(target, prompt, 20, eos_token_ids={eos}) == expected
            assert sum(decoded.accepted_lengths) == len(expected) - 1
            assert all(a <= v for a, v in zip(decoded.accepted_drafts, decoded.verified_drafts, strict=True))


def test_greedy_acceptance_is_the_longest_prefix_the_target_agrees_with():
    logits = torch.eye(6)[[3, 1, 4, 2]]
    assert accept_greedy(torch.tensor([3, 1, 4]), logits).tolist() == [3, 1, 4, 2]
    assert accept_greedy(torch.tensor([3, 0, 4]), logits).tolist() == [3, 1]
    assert accept_greedy(torch.tensor([0, 1, 4]), logits).tolist() == [3]
    assert accept_greedy(torch.empty(0, dtype=torch.long), logits[:1]).tolist() == [3]


def _chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """Pearson's statistic over cells of at least 5 expected, and a bound that chance exceeds once in millions."""
    expected = probabilities * counts.sum()
    kept = expected >= 5
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    freedom = int(kept.sum())
    return statistic, freedom + 6 * math.sqrt(2 * freedom)


def _joint(vocabulary: int, seed: int) -> torch.Tensor:
    """A random distribution over texts of three tokens, [V, V, V]."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(vocabulary**3, generator=generator, dtype=torch.float64)
    return logits.softmax(0).view(vocabulary, vocabulary, vocabulary)


def _speculated(joint: torch.Tensor, q: torch.Tensor, draws: int, seed: int, accept) -> torch.Tensor:
    """How often each text of three tokens comes out when two drafts ~ ``q[2, V]`` are verified by ``joint``."""
    generator = torch.Generator().manual_seed(seed)
    size = joint.shape[0]
    first = joint.sum((1, 2))
    second = joint.sum(2) / first[:, None]
    third = joint / joint.sum(2, keepdim=True)
    counts = torch.zeros(size, size, size, dtype=torch.float64)
    drafts = torch.multinomial(q, draws, replacement=True, generator=generator).T
    for draft in drafts:
        a, b = draft.tolist()
        text = accept(draft, torch.stack([first, second[a], third[a, b]]), q, generator).tolist()
        while len(text) < 3:
            rest = second[text[0]] if len(text) == 1 else third[text[0], text[1]]
            text.append(int(torch.multinomial(rest, 1, generator=generator)))
        counts[tuple(text)] += 1
    return counts


@pytest.mark.parametrize("seed", [0, 1])
def test_sampled_text_has_the_targets_distribution(seed):
    joint = _joint(4, seed)
    q = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed + 9), dtype=torch.float64).softmax(-1)
    statistic, bound = _chi_square(_speculated(joint, q, 6000, seed, accept_sampled), joint)
    assert statistic < bound


def test_the_distribution_test_notices_a_sampler_that_is_wrong():
    joint, q = _joint(4, 0), torch.full((2, 4), 0.25, dtype=torch.float64)

    def without_residual(draft, p, q, generator):
        """Replaces a refused draft by a draw from p instead of what is left of it."""
        chance = p[:2].gather(1, draft[:, None])[:, 0] / 0.25
        accepted = int((torch.rand(2, generator=generator, dtype=p.dtype) < chance).long().cumprod(0).sum())
        return torch.cat([draft[:accepted], torch.multinomial(p[accepted], 1, generator=generator)])

    statistic, bound = _chi_square(_speculated(joint, q, 6000, 0, without_residual), joint)
    assert statistic > bound


def test_a_drafter_that_knows_the_distribution_is_always_accepted():
    p = torch.rand(4, 6, dtype=torch.float64).softmax(-1)
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        drafts = torch.multinomial(p[:3], 1, generator=generator)[:, 0]
        assert accept_sampled(drafts, p, p[:3], generator)[:3].tolist() == drafts.tolist()


def test_decoding_whole_models_by_sampling_keeps_the_targets_distribution():
    target = tiny_target(vocab_size=4, num_hidden_layers=5)
    drafter = _drafter(target, block_size=3)
    prompt, draws, temperature = [1, 2], 600, 0.8
    texts = list(itertools.product(range(4), repeat=3))
    rows = torch.tensor([[*prompt, *text] for text in texts])
    with torch.no_grad():
        log_probs = (target.model(rows).logits[:, 1:4] / temperature).log_softmax(-1)
    expected = log_probs.gather(2, rows[:, 2:, None]).sum((1, 2)).exp()
    assert expected.sum().item() == pytest.approx(1)
    generator = torch.Generator().manual_seed(7)
    counts = torch.zeros(64, dtype=torch.float64)
    for _ in range(draws):
        decoded = speculative_decode(target, drafter, prompt, 3, temperature, generator=generator)
        counts[texts.index(tuple(decoded.tokens))] += 1
    statistic, bound = _chi_square(counts, expected)
    assert statistic < bound


def test_sampling_repeats_with_its_seed():
    target = tiny_target()
    drafter = _drafter(target)

    def text(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return speculative_decode(target, drafter, [1, 2], 20, 1.0, generator=generator).tokens

    assert text(3) == text(3)
    assert text(3) != text(4)


@pytest.mark.parametrize("at_once", [1, 2, 16])
def test_an_evaluation_adds_up_however_many_prompts_are_decoded_at_once(at_once):
    target = tiny_target(vocab_size=8)
    drafter = _drafter(target)
    prompts = [[4, 5, 6], [1], [2, 3]]
    result = evaluate(target, drafter, prompts, 25, at_once=at_once)
    decoded = [speculative_decode(target, drafter, prompt, 25) for prompt in prompts]
    lengths = [length for d in decoded for length in d.accepted_lengths]
    assert isinstance(result, Acceptance)
    assert (result.prompts, result.tokens, result.target_forwards) == (3, 75, len(lengths))
    assert result.mean_accepted_length == pytest.approx(sum(lengths) / len(lengths))
    assert len(result.by_position) == 4
    assert all(0 <= share <= 1 for share in result.by_position)
    first = sum(n >= 1 for d in decoded for n in d.accepted_drafts)
    could = sum(n >= 1 for d in decoded for n in d.verified_drafts)
    assert result.by_position[0] == pytest.approx(first / could)
    assert result.identical == 3
    assert result.speedup == pytest.approx(result.plain_seconds / result.seconds)


def test_an_evaluation_by_sampling_or_without_plain_decoding_claims_no_identity():
    target = tiny_target(vocab_size=8)
    drafter = _drafter(target)
    assert evaluate(target, drafter, [[1]], 5, 1.0).identical is None
    alone = evaluate(target, drafter, [[1]], 5, compare_plain=False)
    assert alone.identical is alone.speedup is alone.plain_seconds is None
    assert evaluate(target, drafter, [[1]], 1).target_forwards == 0


@pytest.mark.parametrize(
    ("prompt", "tokens", "temperature", "part"),
    [([], 5, 0.0, "empty"), ([1], 0, 0.0, "max_new_tokens"), ([1], 5, -1.0, "temperature")],
)
def test_impossible_requests_are_refused(prompt, tokens, temperature, part):
    target = tiny_target(vocab_size=8)
    with pytest.raises(PayloadError, match=part):
        plain_decode(target, prompt, tokens, temperature)
    with pytest.raises(PayloadError, match=part):
        speculative_decode(target, _drafter(target), prompt, tokens, temperature)
    with pytest.raises(PayloadError, match="no prompts"):
        evaluate(target, _drafter(target), [], 5)
