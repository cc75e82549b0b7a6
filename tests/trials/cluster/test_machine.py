"""What this machine is found to be."""

from __future__ import annotations

import torch

from trials.cluster.machine import fastest_threads, matmul_peak, preferred_precision


def test_peak_and_precision_agree() -> None:
    peak = matmul_peak()
    assert peak.fp32 > 0
    assert preferred_precision() == ("bf16" if peak.bf16 > 1.3 * peak.fp32 else "fp32")


def test_threads_are_measured_within_the_limit_and_left_as_they_were() -> None:
    before = torch.get_num_threads()
    assert fastest_threads(1) == 1
    assert fastest_threads(3) in (1, 2, 3)
    assert torch.get_num_threads() == before
