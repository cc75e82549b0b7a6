"""Tables of one process train as `TrainStep` trains them; blocks of tables go from one cut into another."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dhen.batch import FeatureBatch
from dhen.config import ModelConfig
from dhen.cost import NUMBER_BYTES
from dhen.errors import UserError
from dhen.inputs.features import EmbeddingTables, MixedTables, Tables
from dhen.schema import FeatureSchema, Table
from trials.optim.rowwise_adagrad import RowWiseAdagrad
from trials.planner.table_placement import (
    ONE_PROCESS_ROW_STATE_BYTES,
    TABLE_DECAY_ROW_BYTES,
    Placement,
    TableShard,
)
from trials.records.job import TrainingConfig
from trials.records.strategy import Ranks
from trials.training.embeddings.blocks import Block, TableBlock, load_state, state_of, state_to_load
from trials.training.embeddings.engine import TableEngine
from trials.training.embeddings.make_engine import table_engine
from trials.training.embeddings.requirements import INSTALL, check_tables

DIM, ROWS = 12, 5
CPU = torch.device("cpu")
SCHEMA = FeatureSchema(
    tables=(Table(name="a", rows=20), Table(name="b", rows=9), Table(name="m", rows=6, multi_hot=True))
)


def tables() -> EmbeddingTables:
    torch.manual_seed(0)
    return EmbeddingTables(SCHEMA, DIM)


def ones() -> EmbeddingTables:
    made = tables()
    torch.nn.init.ones_(made.weight)
    return made


def mixed_tables() -> MixedTables:
    torch.manual_seed(0)
    return MixedTables(ModelConfig(family="", embedding_dim=DIM, table_dim_exponent=0.6), SCHEMA)


def engine(config: TrainingConfig, made: Callable[[], Tables] = tables) -> TableEngine:
    built = table_engine(made(), SCHEMA, config, Ranks(), None, CPU)
    assert built is not None
    return built


def full_weight(engine: TableEngine) -> Tensor:
    found = engine.full_weights()
    assert found is not None
    return found["weight"]


def batch(step: int) -> FeatureBatch:
    generator = torch.Generator().manual_seed(step)
    ids = [torch.randint(table.rows, (8,), generator=generator) for table in SCHEMA.tables]
    bag = (ids[2], torch.tensor([0, 0, 3, 3, 4, 6, 7, 8]))
    return FeatureBatch(ids_BT=torch.stack(ids[:2], dim=1), bags=(bag,), numeric_BK=torch.zeros(8, 0))


def loss_of(embeddings: Iterable[Tensor]) -> Tensor:
    return torch.stack([e.tanh().sum(dim=(1, 2)) for e in embeddings]).sum(dim=0).square().mean()


def train(engine: TableEngine, steps: range) -> None:
    for step in steps:
        engine.scale_learning_rate(1 / (step + 1))
        embeddings = engine.lookup(batch(step))
        loss_of(embeddings).backward()  # type: ignore[no-untyped-call]
        engine.update(embeddings)


@pytest.mark.parametrize("config", [{}, {"embedding_decay": 0.1}, {"table_decay": 0.2}], ids=str)
def test_one_process_trains_as_without_the_seam(config: dict[str, float]) -> None:
    """To the bit."""
    training, peer = TrainingConfig.model_validate(config), tables()
    optimizer = RowWiseAdagrad(
        [peer.weight], lr=0.1, decay=training.embedding_decay, table_decay=training.table_decay
    )
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.catch_up(peer.weight, peer.rows(batch(step)))
        loss_of(peer(batch(step))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.settle()
    mine = engine(training)
    train(mine, range(6))
    assert torch.equal(full_weight(mine), peer.weight.detach())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_held_bytes_are_what_the_planner_counts(precision: Literal["fp32", "fp16"]) -> None:
    for decay, extra in ((0.0, 0), (0.1, TABLE_DECAY_ROW_BYTES)):
        a_row = NUMBER_BYTES[precision] * DIM + ONE_PROCESS_ROW_STATE_BYTES + extra
        config = TrainingConfig(table_decay=decay, table_precision=precision)
        assert engine(config).held_bytes == SCHEMA.total_rows * a_row
        saved = 20 * (DIM - 4) * NUMBER_BYTES[precision]  # the largest table has 4 columns
        assert engine(config, mixed_tables).held_bytes == SCHEMA.total_rows * a_row - saved


# In fp16


def test_updates_below_fp16s_resolution_add_up() -> None:
    """A thousand of at most 1e-4 on weights of 1: all would be lost to the nearest. Gradients are as small as
    those of a mean over many examples, which fp16 does not have."""
    moved = []
    for precision in ("fp32", "fp16"):
        config = TrainingConfig.model_validate(
            {"embedding_learning_rate": 1e-4, "table_precision": precision}
        )
        each = engine(config, ones)
        for _ in range(1000):
            embeddings = each.lookup(batch(0))
            for e in embeddings:
                e.grad = torch.full_like(e, 1e-9)
            each.update(embeddings)
        full = full_weight(each)
        moved.append(1 - full[batch(0).ids_BT[:, 0]].mean().item())
    assert moved[1] == pytest.approx(moved[0], rel=0.1)
    assert moved[0] > 3e-3


# Blocks


cuts = st.sets(st.integers(1, DIM - 1)).map(lambda inner: list(itertools.pairwise([0, *sorted(inner), DIM])))


def held(cut: list[tuple[int, int]], seed: int) -> list[TableBlock]:
    generator = torch.Generator().manual_seed(seed)
    return [
        TableBlock(
            Block(table, start, stop - start),
            torch.rand(ROWS, stop - start, generator=generator),
            torch.rand(ROWS, generator=generator),
        )
        for table in ("a", "b.with 1-2")
        for start, stop in cut
    ]


def columns_of(blocks: list[TableBlock], table: str, *, sums: bool) -> torch.Tensor:
    parts = [
        sum_R.unsqueeze(1).expand_as(weight) if sums else weight
        for block, weight, sum_R in blocks
        if block.table == table
    ]
    return torch.cat(parts, dim=1)


@given(cuts, cuts)
def test_any_cut_loads_into_any_other(theirs: list[tuple[int, int]], mine: list[tuple[int, int]]) -> None:
    """Weights are the same; a block's sum is the mean over its columns of what the sums over them were."""
    saved, fresh = held(theirs, 1), held(mine, 2)
    wanted = state_to_load(state_of(saved), fresh)
    for key, tensor in state_of(saved).items():
        wanted[key].copy_(tensor)
    load_state(wanted, fresh)
    for table in ("a", "b.with 1-2"):
        assert torch.equal(columns_of(saved, table, sums=False), columns_of(fresh, table, sums=False))
        each = columns_of(saved, table, sums=True)
        blocks = [block for block in fresh if block.block.table == table]
        for (start, stop), block in zip(mine, blocks, strict=True):
            torch.testing.assert_close(block.sum_R, each[:, start:stop].mean(dim=1))


def test_a_rank_loads_only_what_it_needs() -> None:
    saved = state_of(held([(0, 4), (4, 8), (8, 12)], 1))
    mine = [block for block in held([(0, 8), (8, 12)], 2) if block.block == Block("a", 8, 4)]
    assert state_to_load(saved, mine).keys() == {"weight.a.8-12", "sum.a.8-12"}
    other = [block for block in held([(0, 6), (6, 12)], 2) if block.block == Block("a", 6, 6)]
    assert {key for key in state_to_load(saved, other) if key.startswith("w")} == {
        "weight.a.4-8",
        "weight.a.8-12",
    }


# What is looked at before ranks start


def placement(ranks: int, columns: int = 12) -> Placement:
    nothing = (0.0,) * ranks
    return Placement(
        (), (TableShard("a", 0, 0, columns),), (0,) * ranks, nothing, nothing, nothing, nothing, 0
    )


def test_widths_that_kernels_do_not_take_are_refused() -> None:
    with pytest.raises(UserError, match=r"10 columns.*multiples of 4"):
        check_tables(placement(2, columns=10), Ranks(0, 1, 2))


def test_without_torchrec_the_command_is_said() -> None:
    """One rank does without; several say what to do, whether it is looked for or imported."""
    code = f"""
import sys
sys.modules["torchrec"] = sys.modules["fbgemm_gpu"] = None
sys.path.insert(0, "tests/trials/embeddings")
from dhen.errors import UserError
from test_engine import engine, placement
from trials.records.job import TrainingConfig
from trials.records.strategy import Ranks
from trials.training.embeddings import requirements, sharded
engine(TrainingConfig())
def look():
    requirements.check_tables(placement(2), Ranks(0, 1, 2))
for needs in (look, sharded.import_torchrec):
    try:
        needs()
    except UserError as error:
        assert {INSTALL!r} in str(error), error
    else:
        raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_check_before_ranks_start_is_light() -> None:
    module = "trials.training.embeddings.requirements"
    code = f"import sys, {module}\nassert not {{'torch', 'torchrec'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
