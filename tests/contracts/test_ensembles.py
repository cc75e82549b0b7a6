"""Every ensemble keeps the contract: its number of embeddings, its cost, round trips."""

from __future__ import annotations

import pytest
import torch

from dhen.cost import dense_parameters
from dhen.ensemble import ENSEMBLES
from dhen.values import parse

every_ensemble = pytest.mark.parametrize("kind", sorted(ENSEMBLES))
OUT, DIM, BATCH = 3, 4, 2


@every_ensemble
@pytest.mark.parametrize("modules", [1, 2, 4])
def test_number_of_embeddings_is_as_said(kind: str, modules: int) -> None:
    config = ENSEMBLES[kind]()
    ensemble = config.build(modules)
    y = ensemble([torch.randn(BATCH, OUT, DIM) for _ in range(modules)])
    assert y.shape == (BATCH, config.embeddings(modules, OUT), DIM)
    rows = config.cost(modules, OUT, DIM)
    assert dense_parameters(rows) == sum(parameter.numel() for parameter in ensemble.parameters())


@every_ensemble
def test_depends_on_every_output(kind: str) -> None:
    outputs = [torch.randn(BATCH, OUT, DIM, requires_grad=True) for _ in range(3)]
    ENSEMBLES[kind]().build(3)(outputs).square().sum().backward()
    assert all(output.grad is not None and output.grad.abs().sum() > 0 for output in outputs)


@every_ensemble
def test_round_trips(kind: str) -> None:
    config = ENSEMBLES[kind]()
    assert config.kind == kind
    assert parse(ENSEMBLES[kind], config.to_dict(), kind) == config


def test_sum_and_weighted_sum_begin_alike() -> None:
    outputs = [torch.randn(BATCH, OUT, DIM) for _ in range(3)]
    weighted = ENSEMBLES["weighted_sum"]().build(3)(outputs)
    torch.testing.assert_close(ENSEMBLES["sum"]().build(3)(outputs), weighted)
