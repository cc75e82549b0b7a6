"""The loss: of several members the mean of each member's own."""

from __future__ import annotations

import torch

from dhen.members import cross_entropy


def test_each_member_has_a_loss_of_its_own() -> None:
    torch.manual_seed(0)
    logit_BK, label_B, weight_B = torch.randn(8, 3), torch.randint(0, 2, (8,)).float(), torch.rand(8)
    for weight in (None, weight_B):
        own = [cross_entropy(logit_B, label_B, weight) for logit_B in logit_BK.unbind(dim=1)]
        torch.testing.assert_close(cross_entropy(logit_BK, label_B, weight), torch.stack(own).mean())
    assert cross_entropy(logit_BK.bfloat16(), label_B, None).dtype is torch.float32
