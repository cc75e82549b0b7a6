"""The mean of what several networks predict, as one model: of probabilities, corrected for negative sampling.

Worked with in logits, so that whatever takes a network's logits takes these. With z_i a network's logit and r
the fraction of negatives that the log kept, p_i = sigmoid(z_i + log r) is its corrected prediction (He et al.
2014, section 6.3), and the mean's logit is logit(mean p_i) - log r = log sum p_i - log sum (1 - p_i) - log r.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from dhen.batch import FeatureBatch


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
        """Of the network with the most, since one goes forward after another (`dhen.memory.passes`)."""

    def forward(self, batch: FeatureBatch) -> Tensor:
        """logit_B, fp32."""
        return mean_logit((network(batch) for network in self.networks), self.rate).float()
