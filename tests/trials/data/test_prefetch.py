"""Batches prepared ahead are the same batches, errors arrive, and an early end leaves no thread behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from dhen.batch import FeatureBatch
from trials.data.loader import AHEAD, LabelledBatch, on_device
from trials.data.raw.readers import ahead


def numbered(count: int) -> Iterator[LabelledBatch]:
    for number in range(count):
        features = FeatureBatch(ids_BT=torch.full((2, 1), number), bags=(), numeric_BK=torch.zeros(2, 0))
        yield LabelledBatch(features=features, label_B=torch.zeros(2), weight_B=None)


def numbers(batches: Iterator[LabelledBatch]) -> list[int]:
    return [int(batch.features.ids_BT[0, 0]) for batch in batches]


def test_the_same_batches_in_order() -> None:
    assert numbers(ahead(numbered(20), AHEAD)) == list(range(20))
    assert numbers(on_device(numbered(5), torch.device("cpu"))) == list(range(5))


def test_an_error_arrives_after_the_batches_before_it() -> None:
    def failing() -> Iterator[LabelledBatch]:
        yield from numbered(3)
        raise OSError("the disk is gone")

    seen = ahead(failing(), AHEAD)
    assert [next(seen).size for _ in range(3)] == [2, 2, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(seen)


def test_an_early_end_leaves_no_thread() -> None:
    before = threading.active_count()
    batches = ahead(numbered(1000), AHEAD)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
