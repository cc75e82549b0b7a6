"""What this machine is found to be."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from trials.cluster import machine
from trials.cluster.machine import PRODUCT_SIZE, MatmulPeak, fastest_threads, matmul_peak, preferred_precision


def test_peak_and_precision_agree() -> None:
    peak = matmul_peak(PRODUCT_SIZE)
    assert peak.fp32 > 0
    assert preferred_precision() == ("bf16" if peak.bf16 > 1.3 * peak.fp32 else "fp32")


def test_a_bad_moment_does_not_lower_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first measurement of fp32 and the last of bf16 are disturbed by other work."""
    found = iter([(135.0, 800.0), (400.0, 900.0), (390.0, 950.0), (395.0, 940.0), (380.0, 300.0)])

    def measured(size: int) -> MatmulPeak:
        fp32, bf16 = next(found)
        return MatmulPeak(fp32=fp32, bf16=bf16)

    monkeypatch.setattr(machine, "measured_matmul", measured)
    matmul_peak.cache_clear()
    try:
        assert matmul_peak(8) == MatmulPeak(fp32=400.0, bf16=950.0)
    finally:
        matmul_peak.cache_clear()


def test_products_that_take_long_are_not_made_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those in bf16 on a CPU that has no instructions for it."""
    sizes = {torch.float32: 0, torch.bfloat16: 0}

    def seconds(product: partial[torch.Tensor], *_: object, **__: object) -> float:
        (a, _) = product.args
        sizes[a.dtype] = len(a)
        return 1e-12 * len(a) ** 3 * (1e5 if a.dtype == torch.bfloat16 else 1)

    monkeypatch.setattr(machine, "best_seconds", seconds)
    peak = machine.measured_matmul(PRODUCT_SIZE)
    assert sizes == {torch.float32: PRODUCT_SIZE, torch.bfloat16: machine.SMALLEST_PRODUCT}
    assert peak == MatmulPeak(fp32=pytest.approx(2e12), bf16=pytest.approx(2e7))


def test_threads_are_measured_within_the_limit_and_left_as_they_were() -> None:
    before = torch.get_num_threads()
    assert fastest_threads(1) == 1
    assert fastest_threads(3) in (1, 2, 3)
    assert torch.get_num_threads() == before


def test_a_measurement_draws_nothing_that_trainings_draw() -> None:
    before = torch.get_rng_state()
    machine.measured_matmul(8)
    assert torch.equal(torch.get_rng_state(), before)
