"""FiBiNET: bilinear interactions of the embeddings and of the reweighted ones (arXiv 1905.09433, section 3).

A squeeze-and-excitation network weighs the embeddings: a = ReLU(W_2 ReLU(W_1 z)), z_i the mean of x_i, and
v_i = a_i x_i (equations 2 to 4). Every pair i < j interacts as (x_i W) * x_j, product by element, with one W
("field-all"), for x and for v. The paper flattens all pairs into an MLP; here each embedding out is a learned
sum of them, u_l = sum_(i<j) C_lij (x_i W) * x_j + sum_(i<j) C'_lij (v_i W') * v_j, so that no pair is kept in
memory. Left out: a W for each embedding or pair.

Shapes: B examples, M embeddings, D their dimension, L embeddings out, P pairs of embeddings.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dhen.blocks.base import BlockConfig, BlockShape
from dhen.cost import Costs, elementwise_cost, linear_cost, within
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.pairwise import INDEX_BYTES, pair_mix, pair_mix_cost, pair_mix_tape
from dhen.ops.parts import EmbeddingProjection, projection_cost, projection_tape
from dhen.tape import Tape


class FibinetConfig(BlockConfig):
    """Squeeze-and-excitation, and bilinear interactions with and without it."""

    kind: Literal["fibinet"] = "fibinet"
    reduction: int = Field(default=3, gt=0, le=4096)
    """Number of embeddings for each hidden unit of the squeeze-and-excitation network."""

    def hidden(self, embeddings: int) -> int:
        """Hidden units of the squeeze-and-excitation network, one at least."""
        return max(1, embeddings // self.reduction)

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return Fibinet(shape, self.hidden(shape.embeddings))

    def cost(self, shape: BlockShape) -> Costs:
        """The weights of the embeddings, the interactions of both kinds."""
        m, d, hidden = shape.embeddings, shape.dim, self.hidden(shape.embeddings)
        pairs = shape.out * (m * (m - 1) // 2)
        bilinear = (
            projection_cost("w", d, d, m),
            *pair_mix_cost("pairs", shape.out, d, m, m, parameters=pairs),
        )
        return (
            elementwise_cost("squeeze", m * d),
            linear_cost("excite0", m, hidden, bias=False),
            elementwise_cost("excite0.relu", hidden),
            linear_cost("excite1", hidden, m, bias=False),
            elementwise_cost("excite1.relu", m),
            elementwise_cost("reweigh", m * d),
            *within("plain", bilinear),
            *within("reweighed", bilinear),
            elementwise_cost("sum", shape.out * d),
        )

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """The embeddings' other order in memory, their weights, both interactions, their sum."""
        m, d, hidden = shape.embeddings, shape.dim, self.hidden(shape.embeddings)
        x = tape.copy(x)
        squeezed = tape.operation(m, [x])
        excited = linear_tape(tape, squeezed, m, hidden, bias=False, relu=True)
        excited = linear_tape(tape, excited, hidden, m, bias=False, relu=True)
        v = tape.operation(m * d, [x, excited], saves=[x, excited], backward_running=tape.held(m * d))
        tape.refer(excited)
        plain = self._write_bilinear(tape, x, shape)
        total = tape.add(plain, self._write_bilinear(tape, v, shape))
        tape.refer(x, v, plain)
        return tape.copy(total)

    def _write_bilinear(self, tape: Tape, x: int, shape: BlockShape) -> int:
        m, d, out = shape.embeddings, shape.dim, shape.out
        pairs = m * (m - 1) // 2
        tape.buffer_bytes += INDEX_BYTES * pairs
        turned = projection_tape(tape, x, d, d, m)
        weight = tape.operation(0, [], fixed=out * m * m, parameters=[(out, pairs)])
        return pair_mix_tape(tape, turned, x, out, d, weight=weight)


class Fibinet(nn.Module):
    """x_BMD -> u_BLD."""

    def __init__(self, shape: BlockShape, hidden: int) -> None:
        super().__init__()
        m = shape.embeddings
        self.excite = nn.Sequential(
            Linear(m, hidden, bias=False, relu=True), Linear(hidden, m, bias=False, relu=True)
        )
        self.plain, self.reweighed = BilinearPairs(shape), BilinearPairs(shape)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """Both interactions, with embeddings in the last dimension."""
        x_BDM = x_BMD.mT.contiguous()
        v_BDM = x_BDM * self.excite(x_BDM.mean(dim=1)).unsqueeze(1)
        total_BDL: Tensor = self.plain(x_BDM) + self.reweighed(v_BDM)
        return total_BDL.mT.contiguous()


class BilinearPairs(nn.Module):
    """x_BDM -> u_BDL, u_l = sum_(i<j) C_lij (x_i W) * x_j."""

    places: Tensor

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        m = shape.embeddings
        row, column = torch.triu_indices(m, m, offset=1)
        self.register_buffer("places", row * m + column, persistent=False)
        self.w = EmbeddingProjection(shape.dim, shape.dim)
        self.pairs_LP = nn.Parameter(torch.empty(shape.out, len(row)))
        nn.init.xavier_uniform_(self.pairs_LP)

    def forward(self, x_BDM: Tensor) -> Tensor:
        """W works on the components of all embeddings at once; C is zero but for i < j."""
        out, m = len(self.pairs_LP), x_BDM.shape[2]
        weight = self.pairs_LP.new_zeros(out, m * m).index_copy(1, self.places, self.pairs_LP)
        return pair_mix(self.w(x_BDM), x_BDM, weight.view(out, m, m))
