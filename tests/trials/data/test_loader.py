from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trials.data import loader
from trials.data.loader import LabelledBatch, eval_batches, train_batches
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog, Split
from trials.records.strategy import rank_slice

Columns = dict[str, list[Any]]


@pytest.fixture
def log(clicks: Columns, write_csv: Callable[..., Path]) -> PreparedLog:
    return prepare([write_csv(clicks)])


def examples(batches: list[LabelledBatch]) -> list[tuple[Any, ...]]:
    """Each example as a tuple, its bag read one example at a time."""
    found = []
    for batch in batches:
        ids, offsets = batch.features.bags[0]
        ends = [*offsets[1:].tolist(), len(ids)]
        assert batch.weight_B is not None
        for i in range(batch.size):
            bag = ids[offsets[i] : ends[i]].tolist()
            numbers = batch.features.numeric_BK[i].tolist()
            label, weight = float(batch.label_B[i]), float(batch.weight_B[i])
            found.append((label, weight, *batch.features.ids_BT[i].tolist(), *numbers, tuple(bag)))
    return found


def naive(split: Split) -> list[tuple[Any, ...]]:
    assert split.weight is not None
    bags = split.inputs.bags[0]
    return [
        (
            float(split.labels[i]),
            float(split.weight[i]),
            *split.inputs.categorical[i].tolist(),
            *split.inputs.numeric[i].tolist(),
            tuple(bags.ids[bags.offsets[i] : bags.offsets[i + 1]].tolist()),
        )
        for i in range(split.rows)
    ]


def test_evaluation_is_complete_and_in_order_also_of_ranks_that_share_it(log: PreparedLog) -> None:
    for name in ("train", "validation", "test"):
        batches = list(eval_batches(log.split(name), batch_size=17))
        assert examples(batches) == naive(log.split(name))
        assert batches[0].size == batches[0].features.size == 17
    split = log.split("test")
    parts = [list(eval_batches(split, batch_size=9, rank=rank, ranks=4)) for rank in range(4)]
    assert examples(list(chain(*parts))) == naive(split)


@pytest.mark.parametrize("by_windows", [False, True])
def test_training_sees_every_row_once(
    log: PreparedLog, monkeypatch: pytest.MonkeyPatch, by_windows: bool
) -> None:
    monkeypatch.setattr(loader, "GLOBAL_SHUFFLE_BYTES", 0 if by_windows else 1 << 40)
    split = log.split("train")
    batches = list(train_batches(split, batch_size=48, seed=3, epoch=1))
    assert [batch.size for batch in batches] == [48] * (split.rows // 48)
    assert split.rows % 48 == 0
    assert sorted(examples(batches)) == sorted(naive(split))
    assert examples(batches) != naive(split)


def test_the_last_partial_batch_is_dropped_unless_it_is_the_only_one(log: PreparedLog) -> None:
    split = log.split("train")
    sizes = [batch.size for batch in train_batches(split, batch_size=100, seed=0, epoch=0)]
    assert sizes == [100] * 4
    assert [batch.size for batch in train_batches(split, batch_size=5000, seed=0, epoch=0)] == [split.rows]
    assert not list(train_batches(split, batch_size=100, seed=0, epoch=0, start_batch=4))
    assert not list(train_batches(split, batch_size=100, seed=0, epoch=0, start_batch=9))


@pytest.mark.parametrize("by_windows", [False, True])
def test_a_part_of_the_log_is_its_last_rows(
    log: PreparedLog, monkeypatch: pytest.MonkeyPatch, by_windows: bool
) -> None:
    """All ranks and a pass that goes on see the same rows, in the same order."""
    monkeypatch.setattr(loader, "GLOBAL_SHUFFLE_BYTES", 0 if by_windows else 1 << 40)
    split = log.split("train")
    batches = list(train_batches(split, batch_size=25, seed=3, epoch=1, last_rows=100))
    assert sorted(examples(batches)) == sorted(naive(split)[-100:])
    rest = train_batches(split, batch_size=25, seed=3, epoch=1, last_rows=100, start_batch=3)
    assert examples(list(rest)) == examples(batches)[75:]
    half = train_batches(split, batch_size=25, seed=3, epoch=1, last_rows=100, rank=1, ranks=2)
    assert examples([next(half)]) == examples(batches[:1])[12:]
    in_order = train_batches(split, batch_size=50, seed=0, epoch=0, last_rows=100, shuffle=False)
    assert examples(list(in_order)) == naive(split)[-100:]


def test_a_pass_goes_on_where_it_was_interrupted(log: PreparedLog) -> None:
    split = log.split("train")
    whole = examples(list(train_batches(split, batch_size=32, seed=5, epoch=2)))
    rest = examples(list(train_batches(split, batch_size=32, seed=5, epoch=2, start_batch=6)))
    assert rest == whole[6 * 32 :]


@pytest.mark.parametrize("size", [40, 42])
def test_ranks_divide_each_global_batch(log: PreparedLog, size: int) -> None:
    split = log.split("train")
    whole = list(train_batches(split, batch_size=size, seed=5, epoch=0))
    parts = [list(train_batches(split, batch_size=size, seed=5, epoch=0, rank=r, ranks=4)) for r in range(4)]
    for step, batch in enumerate(whole):
        assert examples([part[step] for part in parts]) == examples([batch])
        assert {part[step].size for part in parts} <= {size // 4, -(-size // 4)}


@given(st.integers(0, 1000), st.integers(1, 64))
def test_slices_of_ranks_follow_one_another(size: int, ranks: int) -> None:
    slices = [rank_slice(size, rank, ranks) for rank in range(ranks)]
    assert [n for part in slices for n in range(size)[part]] == list(range(size))


def test_tensors_are_what_models_take(log: PreparedLog) -> None:
    split = log.split("train")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as torch's for arrays that cannot be written to
        for batch in (
            next(train_batches(split, batch_size=8, seed=0, epoch=0)),
            next(eval_batches(split, batch_size=8)),
        ):
            features = batch.to("cpu", non_blocking=True).features
            assert (features.ids_BT.dtype, features.numeric_BK.dtype) == (torch.int32, torch.float32)
            ids, offsets = features.bags[0]
            table = torch.nn.functional.embedding_bag(ids.long(), torch.ones(20, 2), offsets)
            assert table.shape == (8, 2)
            batch.label_B.add_(1.0)  # its own memory, not the cache's
    assert set(np.unique(log.split("train").labels)) == {0.0, 1.0}


def test_a_log_without_weights_has_none(clicks: Columns, write_csv: Callable[..., Path]) -> None:
    del clicks["example_weight"]
    batch = next(eval_batches(prepare([write_csv(clicks)]).split("train"), batch_size=3))
    assert batch.weight_B is None
    assert batch.to("cpu").weight_B is None
