"""The DHEN layer is the paper's equation, with its two shortcuts and the raw numeric inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dhen.config import LayerConfig
from dhen.dhen_model import DhenLayer, LayerShape

B, M, D, K = 6, 4, 8, 3
SHAPE = LayerShape(embeddings=M, dim=D, numeric=K)


def layer(**settings: object) -> DhenLayer:
    torch.manual_seed(0)
    return DhenLayer(LayerConfig(**settings), SHAPE, dropout=0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("ensemble", ["concat", "sum"])
def test_output_is_norm_of_ensemble_plus_shortcut(ensemble: str) -> None:
    built = layer(modules=["linear", "cross"], ensemble=ensemble, out_embeddings=3)
    x_BMD, raw_BK = torch.randn(B, M, D), torch.randn(B, K)
    outputs = [block(x_BMD) for block in built.blocks]
    joined = torch.cat(outputs, dim=1) if ensemble == "concat" else outputs[0] + outputs[1]
    expected = nn.functional.layer_norm(joined + built.shortcut(x_BMD), (D,))
    torch.testing.assert_close(built(x_BMD, raw_BK), expected)


def test_shortcut_is_the_identity_where_lengths_agree() -> None:
    same = layer(modules=["linear", "cross"], ensemble="concat", out_embeddings=M // 2)
    assert isinstance(same.shortcut, nn.Identity)
    other = layer(modules=["linear", "cross"], ensemble="concat", out_embeddings=M)
    assert sum(parameter.numel() for parameter in other.shortcut.parameters()) == M * 2 * M


def test_raw_numeric_reaches_the_modules_and_not_the_shortcut() -> None:
    built = layer(modules=["linear"], out_embeddings=M, raw_numeric=True)
    x_BMD = torch.randn(B, M, D)
    assert not torch.allclose(built(x_BMD, torch.zeros(B, K)), built(x_BMD, torch.ones(B, K)))
    assert isinstance(built.shortcut, nn.Identity)
    plain = layer(modules=["linear"], out_embeddings=M)
    torch.testing.assert_close(plain(x_BMD, torch.zeros(B, K)), plain(x_BMD, torch.ones(B, K)))


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_norm_may_stand_in_front(norm: str) -> None:
    built = layer(modules=["linear", "cross"], out_embeddings=M, norm=norm, norm_placement="pre")
    x_BMD, raw_BK = torch.randn(B, M, D), torch.randn(B, K)
    functions = {"layer": nn.functional.layer_norm, "rms": nn.functional.rms_norm}
    seen = functions[norm](x_BMD, (D,), eps=1e-5)
    expected = sum(block(seen) for block in built.blocks) + x_BMD
    torch.testing.assert_close(built(x_BMD, raw_BK), expected)


def test_norm_and_shortcut_can_be_left_out() -> None:
    bare = layer(modules=["linear"], out_embeddings=2, norm="none", shortcut=False)
    x_BMD = torch.randn(B, M, D)
    torch.testing.assert_close(bare(x_BMD, torch.zeros(B, K)), bare.blocks[0](x_BMD))
