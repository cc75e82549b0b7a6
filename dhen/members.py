"""Several members in one network: shared weights, an adapter of its own for each member, a head of its own.

BatchEnsemble (arXiv 2002.06715, equation 1) in TabM's form (arXiv 2410.24210, sections 3.2 and 3.3): member k
multiplies what reaches a layer by its own r_k, all else in the layer is shared; the first r has random signs,
one an embedding, later ones begin at one. In training every member has a loss of its own, in evaluation their
probabilities are averaged. Left out: BatchEnsemble's factors on outputs.

Members ride in the batch dimension: after the first adapter there are B*K rows, those of one example
together, so every interaction module works as it is.

Shapes: B examples, K members, N = B K rows, M embeddings, D their dimension, V numbers of a row that reaches
the heads, I numbers into a map of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import logsigmoid

from dhen.batch import FeatureBatch
from dhen.cost import CostRow, Costs, elementwise_cost
from dhen.ops.linear import linear, linear_tape
from dhen.ops.parts import mlp_cost
from dhen.tape import LinearBytes, Tape

MEAN_FLOPS = 10
"""Elementwise operations a member for the mean of probabilities, about."""


class MemberAdapter(nn.Module):
    """x_NMD -> x_NMD, N = B*K rows; if members part, of B rows that they still share."""

    def __init__(self, members: int, embeddings: int, dim: int, *, parting: bool) -> None:
        super().__init__()
        self.parting = parting
        scale_KMD = torch.ones(members, embeddings, dim)
        if parting:
            scale_KMD *= 2.0 * torch.randint(0, 2, (members, embeddings, 1)) - 1.0
        self.scale = nn.Parameter(scale_KMD)

    def forward(self, x: Tensor) -> Tensor:
        """Member k's rows times r_k."""
        x_BKMD = x.unsqueeze(1) if self.parting else x.view(-1, *self.scale.shape)
        return (x_BKMD * self.scale).flatten(0, 1)


def adapter_cost(members: int, embeddings: int, dim: int) -> CostRow:
    """The cost of `MemberAdapter`."""
    values = members * embeddings * dim
    return elementwise_cost("adapter", values, parameters=values)


def adapter_tape(tape: Tape, x: int, members: int, embeddings: int, dim: int) -> int:
    """The memory of `MemberAdapter`; from here on an example has `members` rows.

    Backward has a product for x and one for r in all rows before either is summed up.
    """
    given, tape.rows = tape.sizes[x].each, members
    values = embeddings * dim
    both = LinearBytes(2 * tape.held(values).each - given)
    return tape.operation(values, [x], saves=[x], parameters=[(members, values)], backward_running=both)


def of_members(members: int, rows: Costs, *, shared: bool) -> Costs:
    """The rows of one member's part for all: FLOPs of each, parameters once if they are shared."""
    each = 1 if shared else members
    return tuple(replace(row, flops=members * row.flops, parameters=each * row.parameters) for row in rows)


class MemberLinear(nn.Module):
    """A linear map for each member: (K, B, n_in) -> (K, B, n_out)."""

    def __init__(
        self, members: int, n_in: int, n_out: int, *, relu: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        bound = n_in**-0.5  # as torch's linear maps begin
        self.relu, self.p = relu, dropout
        self.weight = nn.Parameter(torch.empty(members, n_out, n_in).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, n_out).uniform_(-bound, bound))

    def forward(self, x_KBI: Tensor) -> Tensor:
        """One batched product; without dropout in evaluation."""
        return linear(x_KBI, self.weight, self.bias, relu=self.relu, p=self.p if self.training else 0.0)


def member_mlp(members: int, n_in: int, widths: Sequence[int], *, dropout: float) -> nn.Sequential:
    """As `dhen.ops.parts.mlp`, one for each member: (K, B, n_in) -> (K, B, widths[-1])."""
    return nn.Sequential(
        *(MemberLinear(members, a, b, relu=True, dropout=dropout) for a, b in pairwise((n_in, *widths)))
    )


def by_member(x_NV: Tensor, members: int, *, parted: bool) -> Tensor:
    """x_KBV of what reaches the heads: B*K rows if members have parted, B that they share if not."""
    if parted:
        return x_NV.view(-1, members, x_NV.shape[1]).transpose(0, 1)
    return x_NV.expand(members, *x_NV.shape)


def heads_cost(members: int, width: int, widths: Sequence[int]) -> Costs:
    """The cost of the heads, of which the last layer puts out the logit, and of their mean."""
    rows = mlp_cost("head", width, (*widths, 1))[:-1]
    mean = elementwise_cost("head.mean", members, flops_each=MEAN_FLOPS)
    return (*of_members(members, rows, shared=False), mean)


def heads_tape(tape: Tape, members: int, width: int, widths: Sequence[int], *, p: float, parted: bool) -> int:
    """The memory of the heads from x_NV; the first one's gradient is made in another order."""
    tape.rows = members if parted else 1
    saved: int | None
    given = saved = tape.input(width)
    tape.rows = members
    x = tape.operation(width, [given], view=True)
    for a, b in pairwise((width, *widths)):
        x, saved = linear_tape(tape, x, a, b, relu=True, p=p, maps=members, saved=saved), None
    return linear_tape(tape, x, (width, *widths)[-1], 1, maps=members, saved=saved)


def mean_logit_of_members(logit_BK: Tensor) -> Tensor:
    """logit_B, in fp32, of the mean of members' probabilities: log(mean p) - log(mean (1 - p))."""
    logit_BK = logit_BK.float()
    return F.logsigmoid(logit_BK).logsumexp(dim=1) - F.logsigmoid(-logit_BK).logsumexp(dim=1)


# The mean of what several networks predict, as one model: of probabilities, corrected for negative sampling.
#
# Worked with in logits, so that whatever takes a network's logits takes these. With z_i a network's logit and r
# the fraction of negatives that the log kept, p_i = sigmoid(z_i + log r) is its corrected prediction (He et al.
# 2014, section 6.3), and the mean's logit is logit(mean p_i) - log r = log sum p_i - log sum (1 - p_i) - log r.


def mean_logit(logits: Iterable[Tensor], rate: float) -> Tensor:
    """The mean's logit (N, fp64, not corrected) from those of its members (N each), one after another.

    `rate`: the fraction of negatives that the log kept.
    """
    shift = math.log(rate)
    yes_N, no_N = torch.tensor(-math.inf).double(), torch.tensor(-math.inf).double()
    for logit_N in logits:
        corrected_N = logit_N.double() + shift
        yes_N = torch.logaddexp(yes_N.to(corrected_N.device), logsigmoid(corrected_N))
        no_N = torch.logaddexp(no_N.to(corrected_N.device), logsigmoid(-corrected_N))
    return yes_N - no_N - shift


def mean_of_logits(logits: Sequence[NDArray[np.float32]], rate: float) -> NDArray[np.float32]:
    """The same (N, fp32) of arrays; of one array, itself."""
    if len(logits) == 1:
        return logits[0]
    found: NDArray[np.float32] = mean_logit(map(torch.tensor, logits), rate).float().numpy()
    return found


def corrected_probability(logit_N: NDArray[np.float32], rate: float) -> NDArray[np.float64]:
    """What a network predicts (N), from its logits."""
    p_N: NDArray[np.float64] = expit(logit_N.astype(np.float64) + np.log(rate))
    return p_N


class MeanOfNetworks(nn.Module):
    """Networks with the same inputs -> logit_B of the mean of their predictions."""

    def __init__(self, networks: Iterable[nn.Module], rate: float) -> None:
        """`rate`: the fraction of negatives that the log kept."""
        super().__init__()
        self.networks, self.rate = nn.ModuleList(networks), rate
        self.row_bytes = max(getattr(network, "row_bytes", 0) for network in self.networks)
        """Of the network with the most, since one goes forward after another (`dhen.tape`)."""

    def forward(self, batch: FeatureBatch) -> Tensor:
        """logit_B, fp32."""
        return mean_logit((network(batch) for network in self.networks), self.rate).float()


# The loss of a batch: weighted cross-entropy; of a network of several members the mean of each one's own.
#
# Members are not trained on the mean of their predictions: they would learn to correct each other, and the mean
# of what each has learned by itself is what generalises (arXiv 2410.24210, section 3.1).


def cross_entropy(logit: Tensor, label_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """A number, in fp32, of logit_B or logit_BK (K members)."""
    if logit.dim() == 2:
        label_B = label_B.unsqueeze(1).expand_as(logit)
        weight_B = None if weight_B is None else weight_B.unsqueeze(1)
    return F.binary_cross_entropy_with_logits(logit.float(), label_B, weight=weight_B)
