"""What more candidates are expected to gain, against draws whose gain is known."""

from __future__ import annotations

import random
import statistics

import pytest

from search.execution.budget import LEAST, PATIENCE, expected_gain, lasting_gain


def draws(count: int, seed: int) -> list[float]:
    """NEs with an exponential tail: 0.9, and as much lower as a tenth of a percent on average."""
    rng = random.Random(seed)
    return [0.9 - 0.0009 * rng.expovariate(1.0) for _ in range(count)]


@pytest.mark.parametrize("count", [20, 50, 200])
@pytest.mark.parametrize("times", [0.5, 1.0, 3.0])
def test_what_is_expected_is_what_comes_on_average(count: int, times: float) -> None:
    """The lowest of (1 + t) n exponential draws is lower than that of n by the scale times ln(1 + t); eight values
    alone say how long the scale is, so what is expected is a little low."""
    expected, came = [], []
    for seed in range(400):
        ne = draws(count + round(times * count), seed)
        gain = expected_gain(ne[:count], times * count)
        assert gain is not None
        expected.append(gain)
        came.append(1.0 - min(ne) / min(ne[:count]))
    assert statistics.mean(expected) == pytest.approx(statistics.mean(came), rel=0.35)


def test_more_candidates_are_expected_to_gain_more_and_ties_nothing() -> None:
    ne = draws(60, 0)
    gains = [expected_gain(ne, more) or 0.0 for more in (1, 10, 100, 1000)]
    assert gains == sorted(gains)
    assert gains[0] > 0.0
    assert expected_gain([0.8] * 40, 100) == 0.0
    assert expected_gain(ne, 0.0) == 0.0


def test_a_best_far_below_the_others_is_not_expected_to_be_beaten_soon() -> None:
    ne = draws(60, 0)
    beaten, alone = expected_gain(ne, 60), expected_gain([*ne, 0.5], 60)
    assert beaten is not None
    assert alone is not None
    assert alone > beaten, "how far good ones lie apart is known from it, too"
    assert alone * 0.5 < 0.3 * (min(ne) - 0.5)


def test_too_few_candidates_say_nothing() -> None:
    assert expected_gain(draws(LEAST - 1, 0), 10) is None
    assert expected_gain(draws(LEAST, 0), 10) is not None


def test_one_lucky_candidate_does_not_end_a_search() -> None:
    """After it the next one seems far away; ten candidates later that still has to be so."""
    ne = draws(60, 0)
    lucky = [*ne, min(ne) - 0.01]
    assert (expected_gain(lucky, 60) or 0.0) != lasting_gain(lucky, 60)
    after = [gain for count in range(52, 62) if (gain := expected_gain(lucky[:count], 60)) is not None]
    assert lasting_gain(lucky, 60) == max(after)
    assert lasting_gain(ne[: LEAST + PATIENCE - 2], 60) is None
    assert lasting_gain(ne[: LEAST + PATIENCE - 1], 60) is not None
