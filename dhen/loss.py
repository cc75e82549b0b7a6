"""The loss of a batch: weighted cross-entropy; of a network of several members the mean of each one's own.

Members are not trained on the mean of their predictions: they would learn to correct each other, and the mean
of what each has learned by itself is what generalises (arXiv 2410.24210, section 3.1).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logit: Tensor, label_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """A number, in fp32, of logit_B or logit_BK (K members)."""
    if logit.dim() == 2:
        label_B = label_B.unsqueeze(1).expand_as(logit)
        weight_B = None if weight_B is None else weight_B.unsqueeze(1)
    return F.binary_cross_entropy_with_logits(logit.float(), label_B, weight=weight_B)
