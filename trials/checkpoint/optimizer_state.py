"""Optimizer state beside weights in their file, in the form of one process: what goes on learning begins with it.

Names begin with `optimizer.`: `dense.exp_avg` and the like are vectors over all dense weights in the order of
`named_parameters`, `tables.sum.TABLE.FIRST-LAST` row-wise Adagrad's sums by row, `tables.PROGRESS` and so on what
growing tables have counted, `steps` the number of training steps. However a model is held, its state is gathered
into this form and put back from it. Weights are not part of it: they have a form of their own.

Without it, Adagrad's first update of a row is as large as if nothing had been learnt (docs/log.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trials.checkpoint.checkpointer import DENSE, TABLES, Resumable
from trials.embeddings.blocks import State, sums_of
from trials.embeddings.growing import PROGRESS
from trials.memory.limit import on_host
from trials.ranks import Ranks
from trials.storage.weights_file import OPTIMIZER, Weights

STEPS = f"{OPTIMIZER}steps"
SUM, COUNTED = "sum.", f"{PROGRESS}."


def optimizer_state(step: Resumable, steps: int, ranks: Ranks) -> Weights:
    """Returns a copy of a step's optimizer state after so many steps, on the first rank, empty on others; a
    collective."""
    with on_host():
        dense = step.dense_moments(steps)
        held = {name: [(start, values.cpu()) for start, values in one.pieces] for name, one in dense.items()}
        tables = {name: values.cpu() for name, values in _tables(step).items()}
        of_ranks: list[Any] = [(held, tables)]
        if ranks.world > 1:
            of_ranks = [None] * ranks.world
            dist.gather_object((held, tables), of_ranks if ranks.first else None)
        if not ranks.first:
            return {}
        found: Weights = {STEPS: torch.tensor(steps)}
        for name, one in dense.items():
            whole = torch.empty(one.length)
            for start, values in (piece for held, _ in of_ranks for piece in held[name]):
                whole[start : start + len(values)] = values
            found[f"{OPTIMIZER}{DENSE}{name}"] = whole
        for _, tables in of_ranks:
            found |= {f"{OPTIMIZER}{TABLES}{name}": values.clone() for name, values in tables.items()}
        return found


def put_back(step: Resumable, saved: Weights, ranks: Ranks) -> None:
    """Puts optimizer state, which the first rank has, into a step that has the weights already; does nothing where
    there is none. A collective."""
    if ranks.world > 1:
        given: list[Weights] = [saved]
        dist.broadcast_object_list(given)
        (saved,) = given
    if not saved:
        return
    with on_host(), torch.no_grad():
        for name, one in step.dense_moments(int(saved[STEPS])).items():
            whole = saved[f"{OPTIMIZER}{DENSE}{name}"]
            for start, values in one.pieces:
                values.copy_(whole[start : start + len(values)])
        own, given_tables = step.table_state(), table_part(saved)
        for name, values in own.items():
            if name.startswith(SUM):
                values.copy_(sums_of(given_tables, name.removeprefix(SUM)))
            elif name.startswith(COUNTED):
                values.copy_(given_tables[name])
        step.restored(own, int(saved[STEPS]))


def table_part(saved: Weights) -> State:
    """Returns what of an optimizer state is of the tables, by the names that `put_back` knows a step's by."""
    prefix = f"{OPTIMIZER}{TABLES}"
    return {name.removeprefix(prefix): one for name, one in saved.items() if name.startswith(prefix)}


def _tables(step: Resumable) -> State:
    """Returns what a step's tables have beside weights."""
    return {name: one for name, one in step.table_state().items() if name.startswith((SUM, COUNTED))}
