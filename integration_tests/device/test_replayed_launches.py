"""The exchange of matrices is hidden by products: by the clock of `replay`, for published shapes over 64 ranks."""

import pytest
from replay import MODELS, NUM_RANKS, llama_70b, newton_schulz_seconds, seconds_of_step

AT_MOST = {"70B over 64 ranks": 0.263, "DeepSeek-V3 experts, EP 8 x 64 ranks": 0.231}


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
def test_most_of_the_exchange_is_hidden_at_scale(model: str) -> None:
    """Without overlap a model of these steps takes 0.395 and 0.278 s, and with all that can be hidden 0.240, 0.223."""
    assert seconds_of_step(MODELS[model], NUM_RANKS) <= AT_MOST[model]


def test_two_runs_take_longer_one_after_the_other() -> None:
    shapes = llama_70b()[:28]
    products = sum(map(newton_schulz_seconds, shapes)) / 4
    alone = seconds_of_step(shapes, 4, ahead=1)
    assert products < seconds_of_step(shapes, 4) < alone
