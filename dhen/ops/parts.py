"""The small parts that several modules share: an MLP, the projection over embeddings, the map W_m.

Each part is a torch module with a function for its cost beside it.

Shapes: B examples, M embeddings, D their dimension, L embeddings out, V numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from dhen.cost import CostRow, Costs, elementwise_cost, linear_cost
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.split import How, ParameterSplit, RankGroup, how_split, keep_part, summed
from dhen.tape import Tape

Widths = tuple[Annotated[int, Field(gt=0, le=65_536)], ...]
"""Output widths of the layers of an MLP, first to last."""


def mlp(n_in: int, widths: Sequence[int], *, dropout: float) -> nn.Sequential:
    """Linear, ReLU, dropout for each width: (B, n_in) -> (B, widths[-1]); empty widths are the identity."""
    return nn.Sequential(*(Linear(a, b, relu=True, dropout=dropout) for a, b in pairwise((n_in, *widths))))


def mlp_cost(name: str, n_in: int, widths: Sequence[int]) -> Costs:
    """The cost of `mlp`."""
    rows: list[CostRow] = []
    for index, (a, b) in enumerate(pairwise((n_in, *widths))):
        rows.append(linear_cost(f"{name}{index}", a, b))
        rows.append(elementwise_cost(f"{name}{index}.relu", b))
    return tuple(rows)


def mlp_tape(
    tape: Tape,
    x: int,
    n_in: int,
    widths: Sequence[int],
    *,
    dropout: float,
    x_needs_gradient: bool = True,
    how: Sequence[How | None] | None = None,
) -> int:
    """The memory of `mlp`, whose maps are split as `how` says."""
    for (a, b), one in zip(pairwise((n_in, *widths)), how or [None] * len(widths), strict=True):
        x = linear_tape(tape, x, a, b, relu=True, p=dropout, x_needs_gradient=x_needs_gradient, how=one)
        x_needs_gradient = True
    return x


def split_in_turn(maps: Sequence[nn.Module], group: RankGroup) -> None:
    """Splits linear maps that follow one another (`how_split`)."""
    linear = [one for one in maps if isinstance(one, Linear)]
    assert len(linear) == len(maps)
    sizes = [(one.in_features, one.out_features) for one in linear]
    for one, how in zip(linear, how_split(sizes, group.size), strict=True):
        one.split(how, group)


def undivided(widths: Sequence[int], ranks: int) -> str | None:
    """Says which maps of these output widths, one after another, stay whole on so many ranks; None if none
    does."""
    hows = how_split([(0, width) for width in widths], ranks)
    whole = [width for width, how in zip(widths, hows, strict=True) if how is None]
    if not whole:
        return None
    return f"{ranks} does not divide {'width' if len(whole) == 1 else 'widths'} {', '.join(map(str, whole))}"


class EmbeddingProjection(nn.Module):
    """A linear map over embeddings, W in R^(m x l): x_BMD -> u_BLD (paper, equations 2 and 4)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, n_out, bias=False)
        self.group: RankGroup | None = None

    def split(self, group: RankGroup) -> None:
        """Keeps the map of this rank's part of the M embeddings, which is what comes in from then on."""
        self.group = group
        keep_part(self.linear, "weight", ParameterSplit(1), group)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """u_BLD, each a mix of the M embeddings."""
        u_BLD = mix_embeddings(self.linear.weight, x_BMD)
        return u_BLD if self.group is None else summed(u_BLD, self.group)


def mix_embeddings(weight_LM: Tensor, x_BMD: Tensor) -> Tensor:
    """W x_b for each example b: u_BLD. As a batched product nothing is transposed in memory."""
    return torch.bmm(weight_LM.expand(x_BMD.shape[0], *weight_LM.shape), x_BMD)


def projection_cost(name: str, n_in: int, n_out: int, dim: int) -> CostRow:
    """The cost of `EmbeddingProjection` for embeddings of length `dim`."""
    return linear_cost(name, n_in, n_out, positions=dim, bias=False)


def projection_tape(tape: Tape, x: int, n_in: int, n_out: int, dim: int, *, split: bool = False) -> int:
    """The memory of `mix_embeddings`: its backward has a gradient of the weight for each example, then sums.

    If it is split, x has a rank's part of the `n_in` embeddings.
    """
    if split:
        tape.compute_elsewhere(2.0 * n_in * n_out * dim)
        tape.send("all_reduce", n_out * dim)
        n_in //= tape.ranks
    weight = tape.operation(n_in * n_out, [], parameters=[(n_out, n_in)], view=True)
    return tape.operation(n_out * dim, [weight, x], saves=[x])


def crosses_tape(tape: Tape, x: int, width: int, layers: int, write: Callable[[int, int], int]) -> int:
    """The memory of cross layers x_(i+1) = x_0 * f_i(x_i) + x_i over the flattened embeddings.

    `write` writes one f down, given x_i and the tensor that is saved of it.
    """
    current, saved = (first := tape.view(x)), x
    for _ in range(layers):
        crossed = write(current, saved)
        product = tape.operation(
            width, [first, crossed], saves=[x, crossed], backward_running=tape.held(width), view=True
        )
        current = saved = tape.add(current, product)
    return current


class VectorToEmbeddings(nn.Module):
    """W_m: a single vector of length v becomes l embeddings of length d: (B, v) -> u_BLD = reshape(W_m v + bias).

    The paper's W_m has no bias; modules that end in an MLP keep the one that an MLP's layer has.
    """

    def __init__(self, n_in: int, embeddings: int, dim: int, *, bias: bool = True) -> None:
        super().__init__()
        self.shape = (embeddings, dim)
        self.linear = Linear(n_in, embeddings * dim, bias=bias)

    def forward(self, v_BV: Tensor) -> Tensor:
        """u_BLD."""
        u_BLD: Tensor = self.linear(v_BV).unflatten(1, self.shape)
        return u_BLD


def tower_tape(
    tape: Tape, x: int, n_in: int, widths: Sequence[int], out: int, *, dropout: float, split: bool = True
) -> int:
    """The memory of an MLP and a linear map to `out` numbers."""
    *how, last = how_split([(0, width) for width in (*widths, out)], tape.ranks if split else 1)
    v = mlp_tape(tape, x, n_in, widths, dropout=dropout, how=how)
    return linear_tape(tape, v, (n_in, *widths)[-1], out, how=last)


class Tower(NamedTuple):
    """An MLP and W_m, in which several modules end."""

    n_in: int
    widths: tuple[int, ...]
    embeddings: int
    """L."""
    dim: int

    @property
    def last(self) -> int:
        """Length of what W_m maps."""
        return (self.n_in, *self.widths)[-1]

    def build(self, *, dropout: float) -> tuple[nn.Module, nn.Module]:
        """The two modules."""
        hidden = mlp(self.n_in, self.widths, dropout=dropout)
        return hidden, VectorToEmbeddings(self.last, self.embeddings, self.dim)

    def cost(self) -> Costs:
        """The cost of both."""
        w_m = linear_cost("w_m", self.last, self.embeddings * self.dim)
        return (*mlp_cost("mlp", self.n_in, self.widths), w_m)

    def write(self, tape: Tape, x: int, *, dropout: float, split: bool = False) -> int:
        """The memory of both; if they are split, maps are by columns and by rows in turn."""
        out = self.embeddings * self.dim
        return tower_tape(tape, x, self.n_in, self.widths, out, dropout=dropout, split=split)

    @staticmethod
    def split(module: nn.Module, group: RankGroup) -> None:
        """Splits the two modules, with which `module` ends."""
        assert isinstance(module, nn.Sequential)
        hidden, to_embeddings = module[-2], module[-1]
        assert isinstance(hidden, nn.Sequential)
        assert isinstance(to_embeddings, VectorToEmbeddings)
        split_in_turn([*hidden, to_embeddings.linear], group)

    def whole(self, ranks: int) -> str | None:
        """Widths that the ranks do not divide."""
        return undivided((*self.widths, self.embeddings * self.dim), ranks)
