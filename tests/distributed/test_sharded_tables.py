"""Tables over several gloo ranks train as in one process that keeps one Adagrad sum for each column block."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_ranks import on_ranks
from tools import needs
from torch import Tensor

from dhen.batch import FeatureBatch
from dhen.config import ModelConfig
from dhen.inputs.features import EmbeddingTables, MixedTables, Tables, matrices
from dhen.inputs.lift import held_schema, table_dims
from dhen.schema import FeatureSchema, Table
from trials.cluster.this_machine import load_cluster
from trials.optim.rowwise_adagrad import EPSILON
from trials.planner.table_placement import Placement, TableShard, place
from trials.records.job import TrainingConfig
from trials.records.strategy import Ranks
from trials.training.embeddings.blocks import Block
from trials.training.embeddings.engine import TableEngine
from trials.training.embeddings.make_engine import table_engine

pytestmark = needs("torchrec")

RANKS, DIM, STEPS, EXAMPLES = 4, 12, 4, 22
RATE = 0.3
CPU = torch.device("cpu")
SCHEMA = FeatureSchema(
    tables=(
        Table(name="a.first", rows=50),
        Table(name="small", rows=3),
        Table(name="c", rows=30),
        Table(name="d", rows=11),
        Table(name="bag", rows=40, multi_hot=True, mean_ids=2.0),
        Table(name="small bag", rows=4, multi_hot=True, mean_ids=1.0),
    ),
    numeric=("x",),
)
NODES = held_schema(
    ModelConfig(family="", buckets="interpolated"),
    FeatureSchema(
        tables=(
            *SCHEMA.categorical[:3],
            *(Table(name=name, rows=20, buckets=True) for name in ("n", "o")),
            SCHEMA.multi_hot[0],
        ),
        numeric=("x",),
    ),
)
"""With even and odd nodes, whose ids follow from a column of the batch that both have."""
ONE_TABLE = FeatureSchema(tables=(Table(name="bag", rows=40, multi_hot=True, mean_ids=2.0),))
SMALL = ("small", "small bag")
SHARDS = (
    TableShard("a.first", 3, 0, 4),
    TableShard("a.first", 0, 4, 4),
    TableShard("a.first", 1, 8, 4),
    TableShard("c", 1, 0, 12),
    TableShard("d", 1, 0, 8),
    TableShard("d", 0, 8, 4),
    TableShard("bag", 3, 0, 8),
    TableShard("bag", 0, 8, 4),
    TableShard("n_even", 0, 0, 12),
    TableShard("n_odd", 1, 0, 8),
    TableShard("n_odd", 3, 8, 4),
    TableShard("o_odd", 0, 0, 12),
)
"""Uneven, in no order of ranks; rank 2 has none."""
MIXED = ModelConfig(family="", embedding_dim=DIM, table_dim_exponent=0.4)
"""In which all large tables have 4 columns."""
MIXED_SHARDS = (
    TableShard("a.first", 3, 0, 4),
    TableShard("small", 0, 0, 4),
    TableShard("small", 3, 4, 4),
    TableShard("small", 1, 8, 4),
    TableShard("c", 1, 0, 4),
    TableShard("bag", 0, 0, 4),
)


class Case(NamedTuple):
    """One training."""

    schema: FeatureSchema
    replicated: tuple[str, ...] = ()
    decay: float = 0.0
    table_decay: float = 0.0
    stored: Literal["fp32", "fp16"] = "fp32"
    sent: Literal["fp32", "fp16", "bf16"] = "fp32"
    model: ModelConfig = ModelConfig(family="", embedding_dim=DIM)

    @property
    def config(self) -> TrainingConfig:
        return TrainingConfig(
            batch_size=EXAMPLES,
            embedding_learning_rate=RATE,
            embedding_decay=self.decay,
            table_decay=self.table_decay,
            table_precision=self.stored,
            all_to_all_precision=self.sent,
        )


CASES = {
    "mixed": Case(SCHEMA, SMALL),
    "replicated alone": Case(SCHEMA, tuple(table.name for table in SCHEMA.tables)),
    "one table": Case(ONE_TABLE),
    "table decay": Case(SCHEMA, SMALL, table_decay=0.1),
    "both decays": Case(SCHEMA, SMALL, decay=0.05, table_decay=0.8),
    "nodes": Case(NODES, ("small", "o_even"), decay=0.05, table_decay=0.1),
    "fp16 tables": Case(SCHEMA, SMALL, decay=0.05, table_decay=0.8, stored="fp16"),
    "bf16 transfer": Case(SCHEMA, SMALL, sent="bf16"),
    "mixed dimensions": Case(SCHEMA, ("d", "small bag"), decay=0.05, table_decay=0.1, model=MIXED),
}
SAVED = {"table decay": 1e-5, "mixed dimensions": 1e-5, "fp16 tables": 1e-3}
"""Cases that are saved half way, and how far what goes on is from what was not disturbed."""
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 1e-2}
"""By the coarsest numbers in use."""


def placement(case: Case) -> Placement:
    tables = {table.name for table in case.schema.tables} - set(case.replicated)
    every = MIXED_SHARDS if case.model is MIXED else SHARDS
    shards = tuple(shard for shard in every if shard.table in tables)
    nothing = (0.0,) * RANKS
    return Placement(case.replicated, shards, (0,) * RANKS, nothing, nothing, nothing, nothing, 0)


def tables(case: Case) -> Tables:
    torch.manual_seed(0)
    return MixedTables(case.model, case.schema) if case.model is MIXED else EmbeddingTables(case.schema, DIM)


def dim_of(case: Case, table: str) -> int:
    names = [each.name for each in case.schema.tables]
    return table_dims(case.model, case.schema)[names.index(table)]


def rate_factor(step: int) -> float:
    return 1.0 - step / (2 * STEPS)


def count(step: int) -> int:
    """Of all ranks together; in one step a rank has none."""
    return 3 if step == 2 else EXAMPLES


def examples(schema: FeatureSchema, step: int, rank: int, ranks: int) -> FeatureBatch:
    """A rank's part, with a length of its own, of one and the same batch of all; every third bag is empty."""
    generator = torch.Generator().manual_seed(step)
    start, stop = count(step) * rank // ranks, count(step) * (rank + 1) // ranks

    def drawn(table: Table, count: int) -> Tensor:
        return torch.randint(table.rows, (count,), generator=generator, dtype=torch.int32)

    plain = [table for table in schema.categorical if not table.buckets]
    buckets = [
        table for table in NODES.categorical if table in schema.tables and table.name.endswith("_even")
    ]
    columns = [drawn(table, count(step))[start:stop] for table in plain]
    columns += [drawn(table.replace(rows=20), count(step))[start:stop] for table in buckets]
    bags = []
    for table in schema.multi_hot:
        lengths = [0 if example % 3 == step % 3 else example % 5 for example in range(count(step))]
        ids = drawn(table, sum(lengths))
        each = torch.split(ids, lengths)[start:stop]
        offsets = [0, *accumulate(len(ids) for ids in each)][:-1]
        bags.append((torch.cat([ids[:0], *each]), torch.tensor(offsets, dtype=torch.int32)))
    ids_BT = torch.stack(columns, dim=1) if columns else torch.empty(stop - start, 0, dtype=torch.int32)
    return FeatureBatch(ids_BT=ids_BT, bags=tuple(bags), numeric_BK=torch.zeros(stop - start, 1))


def loss_of(embeddings: list[Tensor] | tuple[Tensor, ...], step: int) -> Tensor:
    """The sum over examples of something that no two columns or tables play the same part in."""
    e_BN = torch.cat([e.flatten(1) for e in embeddings], dim=1)
    generator = torch.Generator().manual_seed(1000 + step % 4)
    aim_N = torch.randn(e_BN.shape[1:], generator=generator)
    return (e_BN.tanh() - aim_N).square().mul(aim_N.abs()).sum()


def train(engine: TableEngine, schema: FeatureSchema, rank: int, ranks: int, steps: range) -> list[float]:
    """The losses of all examples together."""
    losses = []
    for step in steps:
        engine.scale_learning_rate(rate_factor(step))
        batch = examples(schema, step, rank, ranks)
        embeddings = engine.lookup(batch)
        loss = loss_of(embeddings, step) / count(step) * ranks
        loss.backward()  # type: ignore[no-untyped-call]
        engine.update(embeddings)
        total = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def reference(case: Case, blocks: list[Block], steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights by the definition: dense gradients, one sum per row and block, decay of all rows."""
    model, config, losses = tables(case), case.config, []
    whole = matrices(model)
    sums = {block: torch.zeros(len(rows_of(block, whole)[1])) for block in blocks}
    for step in range(steps):
        rate = RATE * rate_factor(step)
        batch = examples(case.schema, step, 0, 1)
        loss = loss_of(model(batch), step) / count(step)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        gradients = {name: decayed(each, batch, rate, config) for name, each in whole.items()}
        for block, sum_R in sums.items():
            name, rows = rows_of(block, whole)
            columns = slice(block.first_column, block.first_column + block.columns)
            gradient_RC = gradients[name][rows.start : rows.stop, columns]
            sum_R += gradient_RC.square().mean(dim=1)
            update_RC = rate * gradient_RC / (sum_R.sqrt() + EPSILON).unsqueeze(1)
            whole[name].weight.detach()[rows.start : rows.stop, columns] -= update_RC
    return losses, {name: each.weight.detach() for name, each in whole.items()}


@torch.no_grad()
def decayed(matrix: EmbeddingTables, batch: FeatureBatch, rate: float, config: TrainingConfig) -> Tensor:
    """The gradient, taken away, with L2 decay; all rows shrink."""
    weight = matrix.weight
    assert weight.grad is not None
    gradient = weight.grad.to_dense()
    weight.grad = None
    touched = torch.zeros(len(weight), 1)
    touched[matrix.rows(batch)] = 1.0
    weight.mul_(1 - rate * config.table_decay)
    return gradient + config.embedding_decay * weight * touched


def rows_of(block: Block, whole: dict[str, EmbeddingTables]) -> tuple[str, range]:
    """The matrix that a block's table lies in, and its rows there."""
    for name, each in whole.items():
        starts = accumulate((table.rows for table in each.tables), initial=0)
        for table, ends in zip(each.tables, pairwise(starts), strict=True):
            if table.name == block.table:
                return name, range(*ends)
    raise AssertionError(block)


def blocks_of(case: Case) -> list[Block]:
    shards = [Block(s.table, s.first_column, s.columns) for s in placement(case).shards]
    return [*shards, *(Block(name, 0, dim_of(case, name)) for name in case.replicated)]


# What a rank does


def every_case(folder: Path) -> dict[str, Any]:
    here = Ranks(dist.get_rank(), 2, RANKS // 2)
    found = {name: trained(case, here) for name, case in CASES.items()}
    checkpoints = {name: saved(name, here, folder) for name in SAVED}
    return {"trained": found, **moved(here), "planned": planned(here), "checkpoints": checkpoints}


def trained(case: Case, here: Ranks) -> dict[str, Any]:
    engine = engine_of(case, here)
    losses = train(engine, case.schema, here.rank, here.world, range(STEPS))
    full = engine.full_weights()
    assert (full is not None) == here.first
    state = engine.state_dict()
    names = [Block(name, 0, dim_of(case, name)).name for name in case.replicated]
    copied = [state[f"{kind}.{name}"] for name in names for kind in ("weight", "sum")]
    return {"losses": losses, "weights": full, "equal": alike(copied)}


def engine_of(case: Case, here: Ranks, made: Tables | None = None) -> TableEngine:
    where = placement(case) if here.world > 1 else None
    built = table_engine(made or tables(case), case.schema, case.config, here, where, CPU)
    assert built is not None
    return built


def alike(tensors: list[Tensor]) -> bool:
    """Whether all ranks hold the same, to the bit."""
    for tensor in tensors:
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor.contiguous())
        if not all(torch.equal(tensor, other) for other in others):
            return False
    return True


def moved(here: Ranks) -> dict[str, Any]:
    """The full matrix in and out again; a lookup without gradients needs no update after it."""
    case = CASES["table decay"]
    peer = tables(case)
    assert isinstance(peer, EmbeddingTables)
    weight = peer.weight.detach().clone()
    engine = engine_of(case, here)
    full = engine.full_weights()
    batch = examples(case.schema, 1, here.rank, here.world)
    with torch.no_grad():
        looked_up = engine.lookup(batch)
        right = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(looked_up, peer(batch), strict=True))
    return {
        "round trip": full is None or torch.equal(full["weight"], weight),
        "lookup": right and not any(e.requires_grad for e in looked_up),
    }


def planned(here: Ranks) -> list[tuple[int, int]]:
    """What every rank holds, and should, with tables in fp32 and in fp16."""
    cluster = load_cluster("zionex").with_ranks(f"{here.hosts}x{here.gpus_per_host}")
    found: list[tuple[int, int]] = []
    for name, weight_bytes in (("mixed", 4), ("fp16 tables", 2), ("mixed dimensions", 4)):
        case = CASES[name]
        dims = table_dims(case.model, SCHEMA)
        where = place(SCHEMA.tables, dims, cluster, global_batch=EXAMPLES, weight_bytes=weight_bytes)
        assert where.shards
        engine = table_engine(tables(case), SCHEMA, case.config, here, where, CPU)
        assert engine is not None
        train(engine, SCHEMA, here.rank, here.world, range(2))
        held = torch.zeros(here.world, dtype=torch.int64)
        held[here.rank] = engine.held_bytes
        dist.all_reduce(held)
        found += zip(held.tolist(), where.bytes_per_rank, strict=True)
    return found


def saved(name: str, here: Ranks, folder: Path) -> list[float]:
    """A checkpoint half way, into a fresh engine and on; it stays in the folder, for other ranks to go on from."""
    case, half = CASES[name], STEPS // 2
    engine = engine_of(case, here)
    train(engine, case.schema, here.rank, here.world, range(half))
    path = folder / name
    dcp.save({"tables": engine.state_dict()}, checkpoint_id=path)
    return go_on(case, here, path, range(half, STEPS))[1]


def go_on(case: Case, here: Ranks, path: Path, steps: range) -> tuple[TableEngine, list[float]]:
    """An engine into which a checkpoint of any placement was loaded, and its losses from then on."""
    zeros = tables(case)
    for weight in zeros.parameters():
        torch.nn.init.zeros_(weight)
    engine = engine_of(case, here, zeros)
    metadata = dcp.FileSystemReader(path).read_metadata()
    names = {key.removeprefix("tables.") for key in metadata.state_dict_metadata}
    state = engine.state_dict(names)
    dcp.load({"tables": state}, checkpoint_id=path)
    engine.load_state_dict(state)
    return engine, train(engine, case.schema, here.rank, here.world, steps)


# What is expected of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    answer: dict[str, Any] = on_ranks(every_case, RANKS, folder)
    return answer


@pytest.mark.parametrize("name", CASES)
def test_ranks_follow_the_definition(found: dict[str, Any], name: str) -> None:
    losses, weights = reference(CASES[name], blocks_of(CASES[name]))
    mine = found["trained"][name]
    coarsest = max(CASES[name].stored, CASES[name].sent, key=TOLERANCE.__getitem__)
    tolerance = TOLERANCE[coarsest]
    assert mine["losses"] == pytest.approx(losses, rel=tolerance)
    for key, weight in weights.items():
        torch.testing.assert_close(mine["weights"][key], weight, rtol=0, atol=10 * tolerance)
    assert mine["equal"]
    if coarsest != "fp32":
        assert mine["losses"] != pytest.approx(losses, rel=1e-7)  # what fp32 agrees to


def test_a_full_matrix_goes_in_and_out(found: dict[str, Any]) -> None:
    assert found["round trip"]
    assert found["lookup"]


def test_ranks_hold_what_the_placement_says(found: dict[str, Any]) -> None:
    for held, expected in found["planned"]:
        assert held == expected


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_goes_on(found: dict[str, Any], name: str) -> None:
    undisturbed = found["trained"][name]["losses"][STEPS // 2 :]
    assert found["checkpoints"][name] == pytest.approx(undisturbed, rel=SAVED[name])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", SAVED)
def test_one_process_goes_on_from_a_checkpoint_of_ranks(
    found: dict[str, Any], folder: Path, name: str
) -> None:
    """With the weights as they were: column blocks are put together again."""
    assert found
    case = CASES[name]
    engine, _ = go_on(case, Ranks(), folder / name, range(0))
    _, weights = reference(case, blocks_of(case), STEPS // 2)
    torch.testing.assert_close(engine.full_weights(), weights, rtol=10 * SAVED[name], atol=10 * SAVED[name])
