import pytest
import torch

from benchmarks.first_step import measure_guard, recipe_of
from payload.compile import guard
from payload.target import Target


def test_the_made_up_target_loads_with_random_weights_and_its_rows_are_usable(tmp_path):
    recipe = recipe_of("tiny", tmp_path)
    target = Target.load(recipe.target)
    features = target.features(torch.zeros(1, 8, dtype=torch.long), (1, 2))
    assert features.shape == (1, 8, 2 * target.config.hidden_size)


@pytest.mark.slow
def test_the_guard_is_measured_against_its_absence_and_left_off():
    torch._dynamo.reset()
    found = measure_guard("cpu")
    assert found["plain_ms"] > 0
    assert found["guarded_ms"] > 0
    assert guard._installed is None
