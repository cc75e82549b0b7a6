"""Shorter embeddings lifted to the common length: e_BD = e_Bd W_t, a linear map for each table (arXiv 1909.11810).

Dense parameters, without a bias. Fresh maps keep the variance of what they lift.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dhen.config import ModelConfig
from dhen.cost import Costs, linear_cost
from dhen.inputs.held_schema import held_schema
from dhen.inputs.table_dims import TableGroup, crossed, table_dims
from dhen.memory.tape import Tape
from dhen.schema import FeatureSchema


class Lift(nn.Module):
    """The maps of T tables that are looked up together: e_BTd -> e_TBD."""

    def __init__(self, tables: int, dim: int, longest: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tables, dim, longest))
        nn.init.normal_(self.weight, std=dim**-0.5)

    def forward(self, e_BTd: Tensor) -> Tensor:
        """One batched product."""
        return torch.bmm(e_BTd.transpose(0, 1), self.weight)


class MixedEmbeddings(nn.Module):
    """What tables of several lengths put out, [e_BTd, ...], and the numeric embedding become x_BMD."""

    def __init__(self, config: ModelConfig, schema: FeatureSchema) -> None:
        super().__init__()
        longest, groups = config.embedding_dim, crossed(config, schema)
        self._order = _order(groups)
        self.lifts = nn.ModuleList(
            Lift(len(places), dim, longest) if dim < longest else nn.Identity() for dim, places in groups
        )

    def forward(self, looked_up: Sequence[Tensor], numeric_BD: Tensor | None) -> Tensor:
        """In the schema's order."""
        columns: list[Tensor] = []
        for lift, e_BTd in zip(self.lifts, looked_up, strict=True):
            columns += lift(e_BTd).unbind(0) if isinstance(lift, Lift) else e_BTd.unbind(1)
        ordered = [columns[place] for place in self._order]
        return torch.stack(ordered if numeric_BD is None else [*ordered, numeric_BD], dim=1)


def lift_cost(config: ModelConfig, schema: FeatureSchema) -> Costs:
    """A linear map for each shorter table."""
    dims = zip(held_schema(config, schema).tables, table_dims(config, schema), strict=True)
    return tuple(
        linear_cost(f"table.{table.name}.lift", dim, config.embedding_dim, bias=False)
        for table, dim in dims
        if dim < config.embedding_dim
    )


def mixed_tape(
    tape: Tape, embeddings: Sequence[int], numeric: Sequence[int], config: ModelConfig, schema: FeatureSchema
) -> int:
    """The memory of `MixedEmbeddings`; `numeric` has one tensor or none."""
    longest, groups = config.embedding_dim, crossed(config, schema)
    columns, wholes = [], []
    for e, (dim, places) in zip(embeddings, groups, strict=True):
        wholes.append(_lifted(tape, e, len(places), dim, longest) if dim < longest else e)
        columns += tape.unbind(wholes[-1], len(places))
    x = tape.concat([*(columns[place] for place in _order(groups)), *numeric])
    tape.refer(*embeddings, *wholes, *numeric)
    return x


def _lifted(tape: Tape, e: int, tables: int, dim: int, longest: int) -> int:
    return tape.operation(tables * longest, [e], saves=[e], parameters=[(tables, dim * longest)])


def _order(groups: Sequence[TableGroup]) -> list[int]:
    """For each table of the schema, its place among what is looked up."""
    places = [place for group in groups for place in group.places]
    return sorted(range(len(places)), key=places.__getitem__)
