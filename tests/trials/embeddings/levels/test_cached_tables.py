"""Tables below the device train to the bit as those on it, through a cache whose copies are counted."""

from __future__ import annotations

import errno
import itertools
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from dhen.batch import FeatureBatch
from dhen.config import ModelConfig
from dhen.errors import UserError
from dhen.inputs.features import EmbeddingTables, MixedTables, Tables
from dhen.schema import FeatureSchema, Table
from trials.records.job import TrainingConfig
from trials.records.strategy import TableLevel
from trials.training.embeddings.engine import LocalTables, TableEngine
from trials.training.embeddings.growing import NewRows
from trials.training.embeddings.levels import CachedTables

DIM, EXAMPLES, CPU = 8, 16, torch.device("cpu")
SCHEMA = FeatureSchema(
    tables=(Table(name="a", rows=300), Table(name="b", rows=90), Table(name="m", rows=60, multi_hot=True))
)
FEW = {EmbeddingTables: (80,), MixedTables: (40, 40, 20)}
"""Rows of the caches, of all 450."""


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DHEN_SEARCH_CACHE", str(tmp_path))


def made(mixed: bool) -> Tables:
    torch.manual_seed(0)
    if mixed:
        return MixedTables(ModelConfig(family="", embedding_dim=DIM, table_dim_exponent=0.6), SCHEMA)
    return EmbeddingTables(SCHEMA, DIM)


def below(config: TrainingConfig, level: TableLevel, *, mixed: bool = False) -> CachedTables:
    tables = made(mixed)
    rows = FEW[type(tables)] if not mixed else FEW[MixedTables][: len(tables)]  # type: ignore[arg-type]
    return CachedTables(tables, config, level, rows, CPU)


def batch(step: int) -> FeatureBatch:
    """Ids of which the low ones occur most."""
    generator = torch.Generator().manual_seed(step)

    def ids(table: Table) -> Tensor:
        uniform = torch.rand(EXAMPLES, generator=generator)
        return (table.rows**uniform).long() - 1

    drawn = [ids(table) for table in SCHEMA.tables]
    return FeatureBatch(
        ids_BT=torch.stack(drawn[:2], dim=1),
        bags=((drawn[2], torch.arange(EXAMPLES)),),
        numeric_BK=torch.zeros(EXAMPLES, 0),
    )


def train(engine: TableEngine, steps: range) -> None:
    for step in steps:
        engine.scale_learning_rate(1 / (step + 1))
        embeddings = engine.lookup(batch(step))
        torch.stack([e.tanh().sum() for e in embeddings]).square().mean().backward()  # type: ignore[no-untyped-call]
        engine.update(embeddings)


def weights(engine: TableEngine) -> dict[str, Tensor]:
    found = engine.full_weights()
    assert found is not None
    return found


@pytest.mark.parametrize("level", ["host", "ssd"])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"embedding_decay": 0.1}, {"table_precision": "fp16"}], ids=["plain", "decay", "fp16"]
)
def test_where_rows_lie_changes_no_number(
    settings: dict[str, object], mixed: bool, level: Literal["host", "ssd"]
) -> None:
    config = TrainingConfig.model_validate(settings)
    local, cached = LocalTables(made(mixed), config), below(config, level, mixed=mixed)
    for start in range(0, 30, 10):
        train(local, range(start, start + 10))
        train(cached, range(start, start + 10))
        with torch.no_grad():
            one, other = local.lookup(batch(99)), cached.lookup(batch(99))
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert weights(local).keys() == weights(cached).keys()
    assert all(torch.equal(weight, weights(cached)[name]) for name, weight in weights(local).items())
    assert cached.cache_use.copied_in > sum(FEW[EmbeddingTables])  # rows have come and gone
    assert cached.held_bytes < local.held_bytes / 2


@pytest.mark.parametrize("level", ["host", "ssd"])
def test_a_checkpoint_goes_from_one_level_to_another_to_the_bit(level: Literal["host", "ssd"]) -> None:
    config = TrainingConfig(table_precision="fp16")
    undisturbed, local = LocalTables(made(mixed=False), config), LocalTables(made(mixed=False), config)
    for engine in (undisturbed, local):
        train(engine, range(12))
    cached = below(config, level)
    train(cached, range(40, 45))  # what it has held is to be forgotten
    engines: list[TableEngine] = [local, cached, LocalTables(made(mixed=False), config)]
    for number, (one, other) in enumerate(itertools.pairwise(engines)):
        saved = {name: tensor.clone() for name, tensor in one.state_dict().items()}
        state = other.state_dict(saved.keys())
        for name, tensor in state.items():
            tensor.copy_(saved[name])
        other.load_state_dict(state)
        steps = range(12 + 6 * number, 18 + 6 * number)
        train(other, steps)
        train(undisturbed, steps)
        assert torch.equal(weights(undisturbed)["weight"], weights(other)["weight"])


def test_every_copy_is_counted_and_each_row_is_in_one_slot() -> None:
    cached = below(TrainingConfig(), "host")
    (cache,) = cached._caches
    looked_up = missed = copied_in = 0
    for step in range(40):
        held = set(cache.row_C.tolist()) - {-1}
        rows = cached._tables.rows(batch(step)).tolist()  # type: ignore[union-attr, operator]
        train(cached, range(step, step + 1))
        looked_up, missed = looked_up + len(rows), missed + sum(row not in held for row in rows)
        copied_in += len(set(rows) - held)
        now = cache.row_C[cache.row_C >= 0].tolist()
        assert len(now) == len(set(now)) <= len(cache.row_C)
        assert set(rows) <= set(now)
        assert sorted(now) == (cache._slot_R >= 0).nonzero().squeeze(1).tolist()
    use = cached.cache_use
    assert (use.steps, use.looked_up, use.missed, use.copied_in) == (40, looked_up, missed, copied_in)
    # all that came in was trained on, so it goes back once it is given away, and the rest in the end
    assert use.copied_out == copied_in - len(now)
    cached.settle()
    assert cached.cache_use.copied_out == copied_in
    cached.settle()
    assert cached.cache_use.copied_out == copied_in


def test_rows_that_occur_most_stay() -> None:
    """The hit rate comes close to the share of lookups that the most frequent rows have."""
    cached, steps = below(TrainingConfig(), "host"), 400
    train(cached, range(100))
    before = cached.cache_use
    train(cached, range(100, steps))
    after = cached.cache_use
    hit_rate = 1 - (after.missed - before.missed) / (after.looked_up - before.looked_up)
    rows = torch.cat([cached._tables.rows(batch(step)) for step in range(100, steps)])  # type: ignore[union-attr, operator]
    counts = rows.bincount(minlength=450).sort(descending=True).values
    best = float(counts[: sum(FEW[EmbeddingTables])].sum() / counts.sum())
    assert best - 0.07 < hit_rate < best + 0.02


def test_a_row_that_begins_anew_is_not_what_the_cache_had() -> None:
    local, cached = LocalTables(made(mixed=False), TrainingConfig()), below(TrainingConfig(), "host")
    rows = torch.tensor([0, 3, 250])
    begun = NewRows(
        rows, torch.tensor([11, 12, 13]), {"a": slice(0, 2), "b": slice(2, 2), "m": slice(2, 2)}, 5
    )
    engines: tuple[TableEngine, ...] = (local, cached)
    for engine in engines:
        train(engine, range(10))
        embeddings = engine.lookup(batch(10), begun)
        torch.stack([e.tanh().sum() for e in embeddings]).sum().backward()  # type: ignore[no-untyped-call]
        engine.update(embeddings)
        train(engine, range(11, 20))
    assert torch.equal(weights(local)["weight"], weights(cached)["weight"])


def test_a_batch_that_reads_more_rows_than_the_cache_has_is_an_error_that_says_so() -> None:
    cached = CachedTables(made(mixed=False), TrainingConfig(), "host", (10,), CPU)
    with pytest.raises(UserError, match=r"cache of tables a, b, m has, which are 10: give a smaller"):
        cached.lookup(batch(0))


@pytest.fixture
def small_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_ssd_without_space_is_found_before_anything_is_written(tmp_path: Path, small_files: None) -> None:
    with pytest.raises(OSError, match="File too large") as raised:
        below(TrainingConfig(), "ssd")
    assert raised.value.errno == errno.EFBIG
    assert list((tmp_path / "tables").iterdir()) == []


def test_a_file_on_the_ssd_has_no_name_that_could_stay_behind(tmp_path: Path) -> None:
    cached = below(TrainingConfig(), "ssd")
    train(cached, range(3))
    assert list((tmp_path / "tables").iterdir()) == []
