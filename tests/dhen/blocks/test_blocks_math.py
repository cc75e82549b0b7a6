"""Interaction modules are their papers' equations, written out over pairs and experts."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from dhen.blocks import BLOCKS, BlockShape
from dhen.ops.experts import expert_linear

B, M, D, L = 6, 5, 8, 3
SHAPE = BlockShape(embeddings=M, dim=D, out=L)


def built(kind: str, **settings: Any) -> Any:
    """A module, in evaluation; parameters that begin at zero or one are drawn, so that they matter."""
    torch.manual_seed(0)
    module = BLOCKS[kind](**settings).build(SHAPE, dropout=0.0).eval()
    for parameter in module.parameters():
        if (parameter == parameter.flatten()[0]).all():
            torch.nn.init.normal_(parameter)
    return module


@pytest.fixture(name="x_BMD")
def embeddings() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(B, M, D)


def test_fm_is_the_sum_over_pairs(x_BMD: Tensor) -> None:
    fm = built("fm")
    w_LM = fm.values.linear.weight
    pairs = [
        (w_LM[:, i] * w_LM[:, j]).view(1, L, 1) * (x_BMD[:, i] * x_BMD[:, j]).unsqueeze(1)
        for i, j in combinations(range(M), 2)
    ]
    torch.testing.assert_close(fm(x_BMD), torch.stack(pairs).sum(0))


def test_low_rank_fm_is_all_dot_products_mixed(x_BMD: Tensor) -> None:
    dots = built("low_rank_fm", rank=2)[0]
    y_MK = dots.mix.linear.weight.T
    expected = dots.norm((x_BMD @ x_BMD.mT @ y_MK).flatten(1))
    torch.testing.assert_close(dots(x_BMD), expected)


def test_dcn_v2_of_full_rank_is_the_full_one(x_BMD: Tensor) -> None:
    low, full = built("dcn_v2", layers=2, rank=M * D), built("dcn_v2", layers=2)
    full[1].load_state_dict(low[1].state_dict())
    for factors, matrix in zip(low[0].crosses, full[0].crosses, strict=True):
        matrix.weight.data = factors[1].weight @ factors[0].weight
        matrix.bias.data = factors[1].bias.data
    torch.testing.assert_close(low(x_BMD), full(x_BMD), rtol=1e-4, atol=1e-5)


def test_dcn_mix_is_a_gated_sum_of_experts(x_BMD: Tensor) -> None:
    experts, rank = 3, 2
    network = built("dcn_mix", experts=experts, rank=rank)[0]
    layer, x = network.layers[0], x_BMD.flatten(1)
    gates = (x @ layer.gate.weight.T).softmax(1)
    expected = x.clone()
    for e in range(experts):
        rows = slice(e * rank, (e + 1) * rank)
        hidden = ((x @ layer.down.weight[rows].T).tanh() @ layer.core_ERR[e]).tanh()
        expected = expected + gates[:, e : e + 1] * x * (hidden @ layer.up.weight[:, rows].T + layer.up.bias)
    torch.testing.assert_close(network(x_BMD).flatten(1), expected)


def test_gated_cross_with_open_gates_is_half_a_dcn_v2(x_BMD: Tensor) -> None:
    gated, plain = built("gated_cross")[0], built("dcn_v2")[0]
    torch.nn.init.zeros_(gated.gates[0].weight)  # sigmoid(0) = 1/2
    plain.crosses[0].load_state_dict(gated.crosses[0].state_dict())
    torch.testing.assert_close(gated(x_BMD) - x_BMD, (plain(x_BMD) - x_BMD) / 2)


def test_cin_is_its_einsum(x_BMD: Tensor) -> None:
    network = built("cin", maps=[4, 2])[0]
    first = torch.einsum("him,bid,bmd->bhd", network.weights[0], x_BMD, x_BMD)
    second = torch.einsum("him,bid,bmd->bhd", network.weights[1], first, x_BMD)
    torch.testing.assert_close(network(x_BMD), torch.cat((first, second), dim=1), rtol=1e-4, atol=1e-5)


def test_fibinet_is_the_sum_over_pairs(x_BMD: Tensor) -> None:
    fibinet = built("fibinet")
    v_BMD = x_BMD * fibinet.excite(x_BMD.mean(2)).unsqueeze(2)
    expected = torch.zeros(B, L, D)
    for e_BMD, bilinear in ((x_BMD, fibinet.plain), (v_BMD, fibinet.reweighed)):
        turned = e_BMD @ bilinear.w.linear.weight.T
        for place, (i, j) in enumerate(combinations(range(M), 2)):
            product = (turned[:, i] * e_BMD[:, j]).unsqueeze(1)
            expected = expected + bilinear.pairs_LP[:, place].view(1, L, 1) * product
    torch.testing.assert_close(fibinet(x_BMD), expected, rtol=1e-4, atol=1e-5)


def test_pnn_weighs_all_products(x_BMD: Tensor) -> None:
    layer = built("pnn", mlp=[6])[0]
    theta_NM = layer.inner.linear.weight
    inner = torch.einsum("ni,nj,bid,bjd->bn", theta_NM, theta_NM, x_BMD, x_BMD)
    weight_NDD = layer.outer.weight.view(6, D, D)
    outer = torch.einsum("nde,bid,bje->bn", weight_NDD, x_BMD, x_BMD)
    expected = (layer.linear(x_BMD.flatten(1)) + inner + outer).relu()
    torch.testing.assert_close(layer(x_BMD), expected, rtol=1e-4, atol=1e-4)


def test_mask_block_multiplies_the_normed_embeddings(x_BMD: Tensor) -> None:
    block = built("mask_block")[0]
    normed = torch.nn.functional.layer_norm(x_BMD, (D,), block.norm.weight, block.norm.bias)
    expected = block.hidden(block.mask(x_BMD.flatten(1)) * normed.flatten(1)).relu()
    torch.testing.assert_close(block(x_BMD), expected)


def test_two_streams_are_fused_head_by_head(x_BMD: Tensor) -> None:
    heads = 2
    streams = built("two_stream", first=[8], second=[4], heads=heads)[0]
    gates = 2 * streams.gates(x_BMD.flatten(1)).sigmoid().unsqueeze(2)
    first = streams.first((x_BMD * gates[:, :M]).flatten(1))
    second = streams.second((x_BMD * gates[:, M:]).flatten(1))
    products = [
        torch.einsum("bi,bj->bij", a, b).flatten(1)
        for a, b in zip(first.chunk(heads, 1), second.chunk(heads, 1), strict=True)
    ]
    torch.testing.assert_close(streams(x_BMD), torch.cat((first, second, *products), dim=1))


def test_two_streams_begin_with_open_gates() -> None:
    gates = BLOCKS["two_stream"]().build(SHAPE, dropout=0.0)[0].gates  # type: ignore[index, union-attr]
    assert 2 * gates(torch.randn(1, M * D)).sigmoid().unique().item() == 1  # type: ignore[operator]


def test_factorized_layers_double_the_order() -> None:
    """Two layers without biases along a ray: a polynomial of order four, as its fifth differences say."""
    layers = built("factorized", widths=[4, 4])[1:3].double()
    for layer in layers:
        torch.nn.init.zeros_(layer.factors.bias)
    x = torch.randn(1, M * D, dtype=torch.float64)
    differences = layers(torch.arange(7, dtype=torch.float64).unsqueeze(1) * x)
    for _ in range(4):
        differences = differences.diff(dim=0)
    assert differences.abs().max() > 1e-3
    torch.testing.assert_close(differences.diff(dim=0), torch.zeros(2, 4, dtype=torch.float64))


def test_token_mixing_gives_each_token_a_head_of_all(x_BMD: Tensor) -> None:
    tokens = 4
    mixing = built("token_mixing", tokens=tokens)[1]
    x_BTD = x_BMD[:, :tokens]
    mixed = torch.stack([torch.cat(list(heads.unbind(1)), dim=1) for heads in x_BTD.chunk(tokens, dim=2)], 1)
    s_BTD = mixing.norms[0](mixed + x_BTD)
    fed = []
    for t in range(tokens):
        hidden = s_BTD[:, t] @ mixing.first.weight[t] + mixing.first.bias[t]
        fed.append(torch.nn.functional.gelu(hidden) @ mixing.second.weight[t] + mixing.second.bias[t])
    torch.testing.assert_close(mixing(x_BTD), mixing.norms[1](torch.stack(fed, 1) + s_BTD))


def test_instance_gate_reads_without_changing_what_it_reads(x_BMD: Tensor) -> None:
    gate = built("instance_gate")[0]
    x_BMD.requires_grad_()
    y = gate(x_BMD)
    (gradient,) = torch.autograd.grad(y.sum(), x_BMD)
    torch.testing.assert_close(gradient, (y / x_BMD).detach())  # of the product alone


def test_sparse_moe_mixes_the_best_experts_of_each_example(x_BMD: Tensor) -> None:
    experts, active = 4, 2
    moe = built("sparse_moe", experts=experts, active=active, hidden=7)
    x_BV = x_BMD.flatten(1)
    logits_BE = moe.gate(x_BV)
    assert len(logits_BE.topk(active).indices.unique()) > active  # not all examples to the same
    hidden = torch.einsum("bv,ehv->beh", x_BV, moe.first.weight) + moe.first.bias
    outputs_BEV = torch.einsum("beh,evh->bev", hidden.relu(), moe.second.weight) + moe.second.bias
    kept = logits_BE >= logits_BE.topk(active).values[:, -1:]
    gates_BE = logits_BE.masked_fill(~kept, -torch.inf).softmax(1)
    expected = torch.einsum("be,bev->bv", gates_BE, outputs_BEV).view(B, L, D)
    torch.testing.assert_close(moe(x_BMD), expected)


def test_sparse_moe_begins_with_all_experts_in_use(x_BMD: Tensor) -> None:
    torch.manual_seed(0)
    moe = BLOCKS["sparse_moe"]().build(SHAPE, dropout=0.0).train()
    moe(torch.randn(64, M, D)).square().sum().backward()
    gradients = moe.first.weight.grad  # type: ignore[union-attr]
    assert (gradients.abs().amax((1, 2)) > 0).all()  # type: ignore[operator, union-attr]


def test_gradients_of_expert_linear() -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((7, 3), (4, 2, 3), (4, 2))
    )
    ends = torch.tensor([2, 2, 6, 7])  # the second expert has no rows
    assert torch.autograd.gradcheck(lambda *given: expert_linear(*given, ends), (x, weight, bias))
    torch.library.opcheck(expert_linear, (x, weight, bias, ends))
