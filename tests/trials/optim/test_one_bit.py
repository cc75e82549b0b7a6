"""One bit per number: what is compressed comes back with what was lost, and one-bit Adam's settings are
checked."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trials.optim import one_bit_adam
from trials.optim.one_bit_adam import (
    AT_ONCE,
    BLOCK,
    LEAST_ROOT,
    LOOKS,
    ChunkLayout,
    CompressedAllReduce,
    OneBitAdam,
    lag_of,
)
from trials.records.job import TrainingConfig

CPU = torch.device("cpu")
LENGTHS = st.one_of(st.integers(1, 5 * BLOCK), st.sampled_from([AT_ONCE["cpu"], 2 * AT_ONCE["cpu"] + 77]))


@settings(max_examples=25)
@given(LENGTHS, st.integers(0, 9))
def test_what_was_sent_and_what_was_lost_are_what_there_was(numbers: int, seed: int) -> None:
    """Signs are those of the numbers, scales the mean magnitudes of blocks, and the second loss is the
    server's."""
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(numbers, generator=generator) * torch.rand(numbers, generator=generator).exp()
    all_reduce, lost = CompressedAllReduce(numbers, None, CPU), vector.clone()
    average = torch.cat([piece.clone() for _, piece in all_reduce(lost)])
    assert torch.equal(average >= 0, vector >= 0)
    torch.testing.assert_close(average + lost + all_reduce.residue, vector, rtol=0, atol=1e-5)
    for sent, block in zip(torch.split(average, BLOCK), torch.split(vector, BLOCK), strict=True):
        torch.testing.assert_close(sent.abs(), block.abs().mean().expand(len(block)), rtol=1e-5, atol=0)


def test_error_feedback_sends_everything_in_the_end() -> None:
    """The same vector again and again is what is sent on average, though each time signs alone are sent."""
    vector = torch.rand(3 * BLOCK, generator=torch.Generator().manual_seed(0)) - 0.5
    all_reduce = CompressedAllReduce(3 * BLOCK, None, CPU)
    carried, total = torch.zeros_like(vector), torch.zeros_like(vector)
    for _ in range(400):
        carried += vector
        for place, piece in all_reduce(carried):
            total[place] += piece
    torch.testing.assert_close(total / 400, vector, rtol=0, atol=0.02)


@pytest.mark.parametrize("ranks", [2, 3, 128])
def test_chunks_cover_the_vector(ranks: int) -> None:
    for numbers in (1, BLOCK, 5 * BLOCK + 1, 1_000_003):
        spans = [ChunkLayout(numbers, ranks).served(rank) for rank in range(ranks)]
        assert [spans[0].start, spans[-1].stop] == [0, numbers]
        assert all(a.stop == b.start for a, b in pairwise(spans))


def frozen_after(variances: list[float], lag: int, ratio: float) -> int | None:
    """The step after which a variance with these gradients' squares is taken for steady."""
    config = TrainingConfig(optimizer="onebit_adam", batch_size=4, precision="fp32")
    weight = torch.nn.Parameter(torch.zeros(8))
    optimizer = OneBitAdam(weight, config, None, [8], total_examples=LOOKS * lag * 4)
    with patch.object(one_bit_adam, "VARIANCE_RATIO", ratio):
        for number, variance in enumerate(variances, start=1):
            weight.grad = torch.full((8,), variance**0.5)
            optimizer.step()
            if optimizer.is_steady():
                return number
    return None


def test_the_variance_is_frozen_when_it_no_longer_changes() -> None:
    assert frozen_after([1.0] * 40, lag=10, ratio=0.96) == 20  # corrected for its start at zero
    assert frozen_after([0.5**n for n in range(60)], lag=10, ratio=0.96) is None
    assert frozen_after([1.2**n for n in range(60)], lag=10, ratio=0.96) is None  # also where it grows
    falls = [4.0] * 10 + [1.0] * 200
    assert (
        60 < (frozen_after(falls, lag=10, ratio=0.96) or 0) < (frozen_after(falls, lag=10, ratio=0.99) or 0)
    )


def test_a_weight_without_gradients_in_the_first_stage_stays_within_bounds_when_it_comes_to_life() -> None:
    config = TrainingConfig.model_validate(
        {
            "optimizer": "onebit_adam",
            "batch_size": 4,
            "precision": "fp32",
            "learning_rate": 0.01,
        }
    )
    weight = torch.nn.Parameter(torch.zeros(6))
    optimizer = OneBitAdam(weight, config, None, [3, 3], total_examples=2 * LOOKS * 4)
    for number in range(40):
        weight.grad = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0, 0.0])
        if number > 10:  # comes to life
            weight.grad[2:] = 1.0
        optimizer.step()
        if optimizer.second_stage is None and optimizer.is_steady():
            optimizer.freeze(
                weight.detach(), *(optimizer.state[weight][m] for m in ("exp_avg", "exp_avg_sq"))
            )
    assert optimizer.compresses
    steps, mean_root = 30, 2 / 3
    assert weight.abs().max() < 1.2 * steps * 0.01 / (LEAST_ROOT * mean_root)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"optimizer": "onebit_adam", "optimizer_precision": "bf16"}, "give optimizer_precision=fp32"),
        ({"optimizer": "onebit_adam", "delayed_update": True}, "leave one of them out"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(words: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainingConfig.model_validate(words)


def test_a_lag_is_a_twentieth_of_the_steps_and_no_shorter_than_the_warm_up_of_rates() -> None:
    def lag(rows: int = 64_000, epochs: int = 2, warmup_share: float = 0.0) -> int:
        config = TrainingConfig(
            optimizer="onebit_adam", batch_size=100, epochs=epochs, warmup_share=warmup_share
        )
        return lag_of(config, config.examples(rows))

    assert lag() == 64
    assert lag(epochs=1000) == 1000
    assert lag(rows=500) == 1
    assert lag(warmup_share=0.3) == 192
