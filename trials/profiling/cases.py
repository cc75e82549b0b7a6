"""What is timed: parts of a training step at a batch, each with a forward and a backward to run again and again.

Beside the subjects they are the inputs with their tables, the optimizers of tables and of the dense part, and the
loss. What an optimizer does counts as backward.

Shapes: B examples, T categorical tables, G growing ones, N batches that take turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dhen.batch import FeatureBatch, Keys
from dhen.blocks.linear import LinearConfig
from dhen.config import LayerConfig
from dhen.inputs.features import (
    ADMISSION,
    TABLE_UPDATE,
    EmbeddingTables,
    FeatureProcessing,
    matrices,
    taped_features,
)
from dhen.inputs.growing import GrowingRows
from dhen.loss import cross_entropy
from dhen.memory.parts import parts
from dhen.memory.segments import Setting
from dhen.schema import FeatureSchema, Growing, Table
from trials.cluster.machine import Precision
from trials.cluster.part_costs import DECAYED, LOSS, UPDATE
from trials.embeddings.blocks import whole_blocks
from trials.embeddings.growing import GrowingTables, begin_rows
from trials.job import TrainingConfig
from trials.optim.adamw import adamw
from trials.optim.master_weights import DTYPES, MasterWeights, dense_parameters
from trials.optim.rowwise_adagrad import RowWiseAdagrad
from trials.profiling.inputs import SKEW, Inputs, feature_batch
from trials.profiling.subjects import Subject, subjects
from trials.ranks import Ranks

BATCHES = (256, 1024)
"""Examples at which parts are timed."""
INPUTS = (
    Inputs(26, 13, 2, 39, 16),
    Inputs(26, 13, 2, 39, 32, 0.25, "apart"),
    Inputs(26, 13, 2, 39, 16, 0.0, "interpolated"),
    Inputs(8, 5, 0, 5, 8, 0.0, "apart"),
    Inputs(12, 0, 0, 13, 64, 0.25),
    Inputs(26, 13, 2, 13, 64),
    Inputs(40, 0, 0, 20, 16, 0.25),
    Inputs(20, 0, 6, 4, 16),
)
GROWING, GROWING_DIM, CAPACITY = (2, 10), 16, 10_000
"""Numbers of growing tables, the length of their embeddings, and how many ids each holds."""
DISTINCT, KEY_BATCHES, ODD = 4, 24, 0x9E3779B97F4A7C1
"""Multiple of the capacity that there are ids, batches of them, and a factor that spreads their keys."""
LAYER = LayerConfig(modules=(LinearConfig(),))
"""A layer that models must have; inputs are timed without it."""
SEVERAL = 3
"""Batches that take turns, so that the next one's rows are not those just read."""
WIDTHS = ((20, 8), (200, 8), (1000, 12), (2000, 2))
"""Widths and numbers of the linear maps whose update is timed."""


class Case(NamedTuple):
    """Something to time."""

    kind: str
    sizes: tuple[float, ...]
    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], None]


def cases(precision: Precision) -> Iterator[Case]:
    """Yields all that is timed in a precision of the dense part."""
    dtype = DTYPES[precision]
    for subject in subjects(dtype.itemsize):
        for batch in BATCHES:
            yield _of_subject(subject, batch, dtype)
    for inputs in INPUTS:
        for batch in BATCHES:
            yield from _of_inputs(inputs, batch, dtype)
    for tables in GROWING:
        for batch in BATCHES:
            yield _of_admission(tables, batch)
    for width, maps in WIDTHS:
        yield _of_update(width, maps, precision)
    for batch in BATCHES:
        yield _of_loss(batch, dtype)


def _of_subject(subject: Subject, batch: int, dtype: torch.dtype) -> Case:
    module = subject.module.to(dtype).train()
    inputs = [torch.randn(batch, *shape).to(dtype).requires_grad_() for shape in subject.inputs]
    gradient = torch.randn_like(subject.call(module, inputs))
    held = [*inputs, *module.parameters()]

    def backward(output: Tensor) -> None:
        output.backward(gradient)  # type: ignore[no-untyped-call]
        _drop_gradients(held)

    return Case(subject.part.kind, subject.part.sizes(batch), lambda: subject.call(module, inputs), backward)


def _of_inputs(inputs: Inputs, batch: int, dtype: torch.dtype) -> Iterator[Case]:
    """Yields the way from ids and numbers to embeddings, and the tables' update without and with decay."""
    schema, model = inputs.schema(), inputs.model((LAYER,))
    features = FeatureProcessing(model, schema).train()
    for parameter in dense_parameters(features).values():
        parameter.data = parameter.data.to(dtype)
    batches = [feature_batch(schema, batch) for _ in range(SEVERAL)]
    gradient = torch.randn_like(features(batches[0], dtype))
    held, turn = list(features.parameters()), itertools.cycle(range(SEVERAL))

    def backward(output: Tensor) -> None:
        output.backward(gradient)  # type: ignore[no-untyped-call]
        _drop_gradients(held)

    tape = taped_features(model, schema, Setting(dtype.itemsize, "cpu"), raw=True).tape
    assert tape is not None
    way, *updates = parts(tape)
    yield Case(way.kind, way.sizes(batch), lambda: features(batches[next(turn)], dtype), backward)
    assert features.tables is not None
    held_in = [*matrices(features.tables).values()]
    if len(held_in) == 1:  # of several only the time of all together would be known
        yield from _of_tables(updates[0].sizes(batch), features, held_in[0], batches, gradient)


def _of_tables(
    sizes: tuple[float, ...],
    features: FeatureProcessing,
    tables: EmbeddingTables,
    batches: list[FeatureBatch],
    gradient: Tensor,
) -> Iterator[Case]:
    """Yields the update of one matrix of tables, without and with decay."""
    by_batch = []
    for each in batches:
        features(each, gradient.dtype).backward(gradient)
        by_batch.append(tables.weight.grad)
        _drop_gradients(features.parameters())
    rows, turn = [tables.rows(each) for each in batches], itertools.cycle(range(SEVERAL))
    for kind, decay in ((TABLE_UPDATE, 0.0), (TABLE_UPDATE + DECAYED, 1e-3)):
        optimizer = RowWiseAdagrad([tables.weight], lr=0.01, decay=1e-5, table_decay=decay)

        def read(optimizer: RowWiseAdagrad = optimizer) -> Tensor:
            place = next(turn)
            optimizer.catch_up(tables.weight, rows[place])
            tables.weight.grad = by_batch[place]
            return tables.weight

        def update(_: Tensor, optimizer: RowWiseAdagrad = optimizer) -> None:
            optimizer.step()
            tables.weight.grad = None

        yield Case(kind, sizes, read, update)


def _of_admission(tables: int, batch: int) -> Case:
    """Returns the way from keys to rows of growing tables that are full, where each batch has some new ones."""
    rule = Growing(capacity=CAPACITY)
    held = tuple(Table(name=f"g{place}", rows=CAPACITY + 1, growing=rule) for place in range(tables))
    schema = FeatureSchema(tables=held)
    matrix, rows = EmbeddingTables(schema, GROWING_DIM), GrowingRows(schema)
    blocks = whole_blocks([matrix], RowWiseAdagrad([matrix.weight], lr=0.01))
    growing = GrowingTables(rows, Ranks())
    keys_NG = (torch.rand(KEY_BATCHES, batch, tables) ** SKEW * DISTINCT * CAPACITY).long() * ODD + 1
    batches = [_keyed_batch(keys_BG) for keys_BG in keys_NG]
    turn = itertools.cycle(batches)

    def forward() -> Tensor:
        features, begun = growing.admit(next(turn))
        begin_rows(blocks, begun)
        return features.ids_BT

    for _ in batches:  # fills the tables
        forward()
    return Case(ADMISSION, (1, batch * tables), forward, lambda _: None)


def _keyed_batch(keys_BG: Tensor) -> FeatureBatch:
    ids_BG = torch.zeros_like(keys_BG, dtype=torch.int32)
    return FeatureBatch(
        ids_BT=ids_BG, bags=(), numeric_BK=torch.empty(len(ids_BG), 0), keys=Keys(keys_BG, ())
    )


def _of_update(width: int, maps: int, precision: Precision) -> Case:
    """Returns AdamW on the flat weights, with gradients put together and weights handed out."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(maps)))
    master, held = MasterWeights(model, precision), list(model.parameters())
    optimizer = adamw([master.flat], TrainingConfig(precision=precision))
    gradients = [torch.randn_like(parameter) for parameter in held]

    def forward() -> Tensor:
        for parameter, gradient in zip(held, gradients, strict=True):
            parameter.grad = gradient
        return master.flat

    def update(_: Tensor) -> None:
        master.gather_gradients()
        optimizer.step()
        optimizer.zero_grad()
        master.publish()

    return Case(UPDATE, (1, master.flat.numel(), len(held)), forward, update)


def _of_loss(batch: int, dtype: torch.dtype) -> Case:
    logit_B, label_B = torch.randn(batch).to(dtype).requires_grad_(), torch.ones(batch)

    def backward(loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        logit_B.grad = None

    return Case(LOSS, (1, batch), lambda: cross_entropy(logit_B, label_B, None), backward)


def _drop_gradients(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None
