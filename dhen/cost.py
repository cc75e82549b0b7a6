"""What a model costs for one example, itemised: FLOPs, parameters, bytes looked up.

Conventions, used in every report: FLOPs are those of a forward pass for one example, a multiply-add
counts as two. Rows of kind `matmul` (convolutions included) equal what `torch.utils.flop_counter`
counts in training mode; `attention` holds the two products of attention, counted analytically (torch's
counter misses them in fused kernels on the CPU, and counts the same if they run unfused); both
together are a model's headline FLOPs. `elementwise` (activations, sums, norms, softmax) and `lookup`
(bytes of table rows read) are items of their own, outside the headline, as is usual in the field.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

MATMUL = "matmul"
ATTENTION = "attention"
ELEMENTWISE = "elementwise"
LOOKUP = "lookup"

NORM_FLOPS = 8
"""Elementwise operations a value in layer normalization (mean, variance, scale, affine)."""
RMS_NORM_FLOPS = 4
"""The same in root mean square normalization (square, sum, scale, weight)."""
SOFTMAX_FLOPS = 5
"""Elementwise operations a value in a softmax (maximum, subtraction, exponential, sum, division)."""
NUMBER_BYTES: dict[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes per number, by the precision that tables are stored in or embeddings sent in."""


@dataclass(frozen=True, slots=True)
class CostRow:
    """One line of a model's cost table; plain, not pydantic's: samplers price hundreds of models a proposal."""

    name: str
    """Where in the model, e.g. `layer0.attention.products`."""
    kind: str
    """`matmul`, `attention`, `elementwise` or `lookup`."""
    flops: float
    """FLOPs of the forward pass per example."""
    parameters: int = 0
    bytes: float = 0.0
    """Bytes of table rows looked up, an example (lookups only)."""

    def within(self, prefix: str) -> CostRow:
        """The same row, named as part of `prefix`."""
        return CostRow(f"{prefix}.{self.name}", self.kind, self.flops, self.parameters, self.bytes)


Costs = tuple[CostRow, ...]
MOST_SHARED = 2**16
"""Largest number of different rows of which one is kept for all: an assumption, some 15 MB."""


@lru_cache(MOST_SHARED)
def shared(row: CostRow) -> CostRow:
    """A row that is equal to this one, and is the same object for all that ask: tables of like models have nearly
    all rows in common, and thousands of them may be kept."""
    return row


def within(prefix: str, rows: Iterable[CostRow]) -> Costs:
    """All rows, named as parts of `prefix`."""
    return tuple(row.within(prefix) for row in rows)


def linear_cost(name: str, n_in: int, n_out: int, *, positions: int = 1, bias: bool = True) -> CostRow:
    """A linear map from n_in to n_out values, applied at `positions` places with the same weights."""
    return CostRow(
        name=name,
        kind=MATMUL,
        flops=2.0 * n_in * n_out * positions,
        parameters=n_in * n_out + (n_out if bias else 0),
    )


def product_cost(name: str, rows: int, inner: int, columns: int, *, kind: str = MATMUL) -> CostRow:
    """A product of two activations, (rows x inner) by (inner x columns); no parameters."""
    return CostRow(name=name, kind=kind, flops=2.0 * rows * inner * columns)


def elementwise_cost(name: str, values: int, *, flops_each: int = 1, parameters: int = 0) -> CostRow:
    """`flops_each` operations on each of `values` values."""
    return CostRow(name=name, kind=ELEMENTWISE, flops=float(values * flops_each), parameters=parameters)


def headline_flops(rows: Iterable[CostRow]) -> float:
    """Forward FLOPs per example: matmuls, convolutions and attention products."""
    return sum(row.flops for row in rows if row.kind in (MATMUL, ATTENTION))


def dense_parameters(rows: Iterable[CostRow]) -> int:
    """Parameters outside the embedding tables."""
    return sum(row.parameters for row in rows if row.kind != LOOKUP)


def embedding_parameters(rows: Iterable[CostRow]) -> int:
    """Parameters of the embedding tables."""
    return sum(row.parameters for row in rows if row.kind == LOOKUP)


def table_bytes(parameters: int, precision: str) -> int:
    """Bytes of embedding tables with so many parameters, as they are stored while they train: all rows that the
    model holds, of a growing table as many as its capacity, and its default row. Optimizer state, and the keys by
    which growing tables know their ids, come on top."""
    return parameters * NUMBER_BYTES[precision]
