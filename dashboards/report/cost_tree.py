"""A model's cost table, folded by layer and module.

The names of its rows say where they belong: `layer0.attention1.qkv` is the row `qkv` of the module `attention1` of
`layer0`, `head0.relu` a row of the head, and `features.table.C1` one of the embedding tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dashboards.names import counted_from_one
from dhen.cost import ATTENTION, MATMUL, CostRow

COUNTED = (MATMUL, ATTENTION)
"""Kinds of rows that make up the FLOPs that are reported."""
_TABLE = re.compile(r"table\.")
_NUMBERED = re.compile(r"(.*?)(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCost:
    """What one module of a layer costs."""

    name: str
    rows: tuple[CostRow, ...]
    """Its rows, named from the module on."""

    @property
    def flops(self) -> float:
        """FLOPs of the rows that are counted."""
        return sum(row.flops for row in self.rows if row.kind in COUNTED)

    @property
    def other_flops(self) -> float:
        """FLOPs outside the number that is reported: elementwise work."""
        return sum(row.flops for row in self.rows if row.kind not in COUNTED)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(row.parameters for row in self.rows)

    @property
    def bytes(self) -> float:
        """Bytes of table rows looked up per example."""
        return sum(row.bytes for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """A layer, the features or the head, with its modules in the model's order."""

    name: str
    modules: tuple[ModuleCost, ...]


def folded(cost: Iterable[CostRow]) -> tuple[LayerCost, ...]:
    """Returns the rows of a cost table by layer and module, both in the order in which they first occur."""
    layers: dict[str, dict[str, list[CostRow]]] = {}
    for row in cost:
        layer, module, rest = _place(row.name)
        named = CostRow(rest, row.kind, row.flops, row.parameters, row.bytes)
        layers.setdefault(layer, {}).setdefault(module, []).append(named)
    return tuple(
        LayerCost(
            name=counted_from_one(layer),
            modules=tuple(
                ModuleCost(name=_module_name(module, modules), rows=tuple(rows))
                for module, rows in modules.items()
            ),
        )
        for layer, modules in layers.items()
    )


def _place(name: str) -> tuple[str, str, str]:
    """The layer, the module and the rest of a row's name."""
    first, _, rest = name.partition(".")
    if first == "features":
        if _TABLE.match(rest):
            return first, "embedding tables", rest.removeprefix("table.")
        return first, _unnumbered(rest.partition(".")[0]), rest
    if first.startswith("layer") and rest:
        module, _, part = rest.partition(".")
        return first, module, part or module
    return _unnumbered(first), _unnumbered(first), name


def _module_name(module: str, modules: Iterable[str]) -> str:
    """`attention` for `attention0` where the layer has one, else `attention 1`, `attention 2` ..."""
    match = _NUMBERED.fullmatch(module)
    if match is None:
        return module
    kind = match[1]
    alike = [other for other in modules if _unnumbered(other) == kind]
    return kind if len(alike) == 1 else f"{kind} {alike.index(module) + 1}"


def _unnumbered(name: str) -> str:
    match = _NUMBERED.fullmatch(name)
    return match[1] if match else name
