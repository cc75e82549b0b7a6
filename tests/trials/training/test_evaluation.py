"""Evaluation: all rows once, and on every rank in as many passes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from command_line import write_log
from torch import Tensor

from dhen.batch import FeatureBatch
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog, Split
from trials.data.roles.infer import infer_schema
from trials.records.events import Event, Progress
from trials.records.strategy import DataPart, Ranks
from trials.training.evaluation import logit_metrics, logits_over_ranks
from trials.training.progressive import Pulse


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    folder = tmp_path_factory.mktemp("rows")
    prepare([write_log(folder / "log.csv", 690)], out=folder / "log")
    found = PreparedLog.open(folder / "log").split("validation")
    assert found.rows == 69
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 5, 17, 99])
def test_every_rank_has_as_many_passes(split: Split, ranks: int, batch_size: int) -> None:
    """Ranks meet in each of them: one that has fewer would let the others wait for ever. 69 rows are 34 and 35 of
    two ranks, which in batches of 2 are 17 and 18 passes."""
    sizes: list[list[int]] = []
    numbers: list[Tensor] = []

    def score(features: FeatureBatch) -> Tensor:
        sizes[-1].append(len(features.numeric_BK))
        return features.numeric_BK[:, 0]

    for rank in range(ranks):
        sizes.append([])
        part = logits_over_ranks(score, split, Ranks(), batch_size, DataPart(rank, ranks))
        assert part is not None
        numbers.append(part)
    assert len({len(passes) for passes in sizes}) == 1
    assert max(map(max, sizes)) <= max(batch_size, 2 if batch_size == 1 and ranks > 1 else 1)
    assert torch.equal(torch.cat(numbers), torch.from_numpy(split.inputs.numeric[:, 0].copy()))


def test_predictions_are_those_of_the_log_before_down_sampling(split: Split, tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.csv", 690)
    sampled = prepare(
        [path], out=tmp_path / "log", schema=infer_schema([path]).replace(negative_sampling_rate=0.25)
    )
    p, label = 0.25 / (0.25 + 0.75 / 0.25), sampled.split("validation").labels  # of a logit of log(1 / 3)
    logit_N = torch.full((len(label),), -math.log(3.0))
    clicks = label.sum() / (label.sum() + 4 * (1 - label).sum())
    found = logit_metrics(logit_N, sampled.split("validation"), sampled)
    assert found.calibration == pytest.approx(p / clicks, rel=1e-5)


def test_going_through_periods_says_that_it_goes_on() -> None:
    """Ranks that are silent for a quarter of an hour are taken for hanging."""
    said: list[Event] = []
    often, never = Pulse(said.append, 0.0, examples=70), Pulse(said.append, 3600.0, examples=70)
    for _ in range(3):
        often()
        never()
    assert [event.examples for event in said if isinstance(event, Progress)] == [70] * 3
