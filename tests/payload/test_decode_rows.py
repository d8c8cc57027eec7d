"""Many prompts decoded at once: each gets exactly what it gets alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from payload.decode import plain_decode, speculative_decode
from payload.decode_rows import plain_decode_rows, speculative_decode_rows
from payload.errors import PayloadError
from payload.row_cache import RowCache
from tests.payload.test_decode import RULES, _drafter, _taught
from tests.payload.test_target import SLIDING
from tests.payload.tiny_targets import FAMILIES, tiny_target

PROMPTS = [[1, 2, 3], [7], [9, 8, 7, 6, 5, 4], [1, 2, 3], [20, 30, 5, 9, 11, 12, 13, 14, 15, 16, 17]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", RULES)
def test_every_row_decodes_token_for_token_and_draft_for_draft_as_it_does_alone(family, rule):
    target = tiny_target(family, num_hidden_layers=5)
    drafter, _ = _taught(target, [[1, 2, 3], [7, 8, 9]], length=30, steps=40, **rule)
    together = speculative_decode_rows(target, drafter, PROMPTS, 30)
    alone = [speculative_decode(target, drafter, prompt, 30) for prompt in PROMPTS]
    assert together == alone
    assert max(max(one.accepted_lengths) for one in alone) >= 4
    assert plain_decode_rows(target, PROMPTS, 30) == [one.tokens for one in alone]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_rows_of_a_target_that_slides_see_no_further_than_its_window(family):
    target = tiny_target(family, **SLIDING)
    drafter = _drafter(target)
    together = speculative_decode_rows(target, drafter, PROMPTS, 20)
    assert together == [speculative_decode(target, drafter, prompt, 20) for prompt in PROMPTS]


@settings(deadline=None, max_examples=25)
@given(
    prompts=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=6), min_size=1, max_size=5),
    length=st.integers(1, 14),
    ends=st.sets(st.integers(0, 7), max_size=3),
    seed=st.integers(0, 3),
)
def test_rows_that_end_early_leave_the_others_as_they_are(prompts, length, ends, seed):
    target = tiny_target(vocab_size=8, seed=seed)
    drafter = _drafter(target, seed)
    together = speculative_decode_rows(target, drafter, prompts, length, ends)
    assert together == [
        speculative_decode(target, drafter, prompt, length, eos_token_ids=ends) for prompt in prompts
    ]
    plain = [plain_decode(target, prompt, length, eos_token_ids=ends) for prompt in prompts]
    assert plain_decode_rows(target, prompts, length, ends) == plain == [one.tokens for one in together]


def test_a_cached_token_is_seen_by_its_own_row_alone_and_never_after_it_was_given_up():
    cache = RowCache(layers=1, rows=2, capacity=8, device=torch.device("cpu"))
    first = torch.arange(2 * 3.0).view(2, 1, 3, 1)
    cache.update(first, first, 0)
    cache.advance([3, 1])
    assert cache.bound == 3
    assert cache.positions(2).tolist() == [[3, 4], [1, 2]]
    second = 10 + torch.arange(2 * 2.0).view(2, 1, 2, 1)
    keys, _ = cache.update(second, second, 0)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 10, 11]
    assert keys[1, 0, :3, 0].tolist() == [3, 12, 13]
    assert cache.visible(2, None)[:, 0].int().tolist() == [
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]],
    ]
    assert cache.visible(2, 2)[1, 0].int().tolist() == [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0]]
    cache.advance([0, 2])
    cache.keep([1])
    assert cache.positions(1).tolist() == [[3]]
    assert cache.slots(0, 3)[0][:, 0, :, 0].tolist() == [[3, 12, 13]]


def test_an_empty_prompt_among_others_is_refused():
    target = tiny_target(vocab_size=8)
    with pytest.raises(PayloadError, match="empty"):
        speculative_decode_rows(target, _drafter(target), [[1], []], 5)
