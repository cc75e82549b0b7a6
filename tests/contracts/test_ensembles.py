"""Every ensemble keeps the contract: its number of embeddings, its cost, round trips."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dhen.cost import dense_parameters, headline_flops
from dhen.ensembles import ENSEMBLES
from dhen.ensembles.ensembles import EnsembleShape
from dhen.values import parse

every_ensemble = pytest.mark.parametrize("kind", sorted(ENSEMBLES))
OUT, DIM, BATCH, M = 3, 4, 2, 5


def shape(modules: int) -> EnsembleShape:
    return EnsembleShape(modules=modules, out=OUT, embeddings=M, dim=DIM)


@every_ensemble
def test_number_of_embeddings_and_cost_are_as_said(kind: str) -> None:
    config = ENSEMBLES[kind]()
    assert config.kind == kind
    assert parse(ENSEMBLES[kind], config.to_dict(), kind) == config
    for modules in (1, 2, 4):
        ensemble = config.build(shape(modules))
        with FlopCounterMode(display=False) as counter:
            y = ensemble([torch.randn(BATCH, OUT, DIM) for _ in range(modules)], torch.randn(BATCH, M, DIM))
        assert y.shape == (BATCH, config.embeddings(modules, OUT), DIM)
        rows = config.cost(shape(modules))
        assert headline_flops(rows) * BATCH == counter.get_total_flops()
        assert dense_parameters(rows) == sum(parameter.numel() for parameter in ensemble.parameters())


@every_ensemble
def test_depends_on_every_output(kind: str) -> None:
    outputs = [torch.randn(BATCH, OUT, DIM, requires_grad=True) for _ in range(3)]
    ENSEMBLES[kind]().build(shape(3))(outputs, torch.randn(BATCH, M, DIM)).square().sum().backward()
    assert all(output.grad is not None and output.grad.abs().sum() > 0 for output in outputs)


def test_sum_and_weighted_sum_begin_alike() -> None:
    outputs = [torch.randn(BATCH, OUT, DIM) for _ in range(3)]
    x_BMD = torch.randn(BATCH, M, DIM)
    weighted = ENSEMBLES["weighted_sum"]().build(shape(3))(outputs, x_BMD)
    torch.testing.assert_close(ENSEMBLES["sum"]().build(shape(3))(outputs, x_BMD), weighted)


def test_gated_weighs_modules_by_the_instance() -> None:
    torch.manual_seed(0)
    outputs, x_BMD = [torch.randn(BATCH, OUT, DIM) for _ in range(3)], torch.randn(BATCH, M, DIM)
    gated = ENSEMBLES["gated"]().build(shape(3))
    weights_BK = gated.gate(x_BMD.flatten(1)).softmax(dim=1)  # type: ignore[operator, union-attr]
    expected = sum(weights_BK[:, i, None, None] * outputs[i] for i in range(3))
    torch.testing.assert_close(gated(outputs, x_BMD), expected)
    assert not torch.allclose(gated(outputs, x_BMD), gated(outputs, -x_BMD))


def test_attention_of_equal_outputs_is_that_output() -> None:
    output = torch.randn(BATCH, OUT, DIM)
    attention = ENSEMBLES["attention"]().build(shape(3))
    torch.testing.assert_close(attention([output] * 3, torch.randn(BATCH, M, DIM)), output)


def test_bilinear_adds_the_products_of_all_pairs() -> None:
    torch.manual_seed(0)
    outputs = [torch.randn(BATCH, OUT, DIM) for _ in range(3)]
    bilinear = ENSEMBLES["bilinear"]().build(shape(3))
    turned = [output @ bilinear.w.weight.T for output in outputs]  # type: ignore[union-attr, operator]
    pairs = [turned[i] * outputs[j] for i in range(3) for j in range(3) if i != j]
    expected = torch.stack([*outputs, *pairs]).sum(dim=0)
    torch.testing.assert_close(bilinear(outputs, torch.randn(BATCH, M, DIM)), expected)
