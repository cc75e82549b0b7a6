"""The DHEN paper's formulas, written once more in numpy: loops over indices in float64, no operation of torch.

What is learned is drawn, so that no weight is one and no bias zero: each enters as its formula says, or a test
fails. Letters are the paper's: n embeddings `m` in, of length `d`, and `l` out; arrays here are embeddings first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from dhen.blocks import BLOCKS, BlockShape
from dhen.config import LayerConfig
from dhen.dhen_model import DhenLayer, LayerShape
from dhen.ensembles import ENSEMBLES
from dhen.ensembles.ensembles import EnsembleShape
from dhen.ops.parts import VectorToEmbeddings

Array = NDArray[np.float64]
M, D, L = 5, 4, 3
SHAPE = BlockShape(embeddings=M, dim=D, out=L)
EXAMPLES = 3
NORM_EPSILON = 1e-5


def drawn(module: nn.Module) -> nn.Module:
    """In float64 and evaluation, every parameter drawn."""
    torch.manual_seed(0)
    module = module.double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def block(kind: str, **settings: Any) -> Any:
    return drawn(BLOCKS[kind](**settings).build(SHAPE, dropout=0.0))


def array(parameter: Any) -> Array:
    found: Array = parameter.detach().numpy()
    return found


@pytest.fixture(name="xs")
def examples() -> Array:
    return np.random.default_rng(1).normal(size=(EXAMPLES, M, D))


def assert_is(module: Any, xs: Array, expected: list[Array]) -> None:
    """`expected`: of each example."""
    found = array(module(torch.from_numpy(xs)))
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-10, atol=1e-10)


def mixed(weight: Array, x: Array) -> Array:
    """u = W x, W in R^(l x m): embedding j of u is the sum of W_ji times embedding i."""
    u = np.zeros((weight.shape[0], x.shape[1]))
    for j in range(weight.shape[0]):
        for i in range(x.shape[0]):
            for c in range(x.shape[1]):
                u[j, c] += weight[j, i] * x[i, c]
    return u


def flat(x: Array) -> list[float]:
    """Embedding after embedding."""
    return [float(x[i, c]) for i in range(x.shape[0]) for c in range(x.shape[1])]


def affine(weight: Array, v: list[float], bias: Array | None = None) -> list[float]:
    """W v + b."""
    out = []
    for row in range(weight.shape[0]):
        total = 0.0 if bias is None else float(bias[row])
        for column, value in enumerate(v):
            total += float(weight[row, column]) * value
        out.append(total)
    return out


def embeddings(v: list[float]) -> Array:
    """reshape: d numbers after d numbers."""
    u = np.zeros((len(v) // D, D))
    for place, value in enumerate(v):
        u[place // D, place % D] = value
    return u


def convolved(x: Array, kernel: Array, bias: float) -> Array:
    """One channel: each place is the weighted sum of its neighbours; outside the image there is zero."""
    half = kernel.shape[0] // 2
    image = np.zeros_like(x)
    for i in range(x.shape[0]):
        for c in range(x.shape[1]):
            total = bias
            for a in range(-half, half + 1):
                for b in range(-half, half + 1):
                    if 0 <= i + a < x.shape[0] and 0 <= c + b < x.shape[1]:
                        total += kernel[half + a, half + b] * x[i + a, c + b]
            image[i, c] = total
    return image


def normalized(y: Array, weight: Array, bias: Array) -> Array:
    """Layer normalization of each embedding."""
    out = np.zeros_like(y)
    for j in range(y.shape[0]):
        mean = sum(y[j, c] for c in range(D)) / D
        variance = sum((y[j, c] - mean) ** 2 for c in range(D)) / D
        for c in range(D):
            out[j, c] = weight[c] * (y[j, c] - mean) / (variance + NORM_EPSILON) ** 0.5 + bias[c]
    return out


def test_linear_is_w_x(xs: Array) -> None:
    linear = block("linear")
    assert_is(linear, xs, [mixed(array(linear.linear.weight), x) for x in xs])


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_the_papers_convolution_is_w_conv(xs: Array, kernel: int) -> None:
    """u = W conv(x), W in R^(l x m)."""
    conv, projection = block("conv", channels=1, kernel=kernel, activation="none")
    weight, bias = array(conv.conv.weight), array(conv.conv.bias)
    w = array(projection.linear.weight)
    assert w.shape == (L, M)
    expected = [mixed(w, convolved(x, weight[0, 0], float(bias[0]))) for x in xs]
    assert_is(nn.Sequential(conv, projection), xs, expected)


def test_a_convolution_of_several_channels_mixes_all_of_them(xs: Array) -> None:
    """u = W (relu(conv_1(x)), relu(conv_2(x)), ...), one channel's embeddings after another's."""
    conv, projection = block("conv", channels=3)
    weight, bias = array(conv.conv.weight), array(conv.conv.bias)
    expected = []
    for x in xs:
        channels = [np.maximum(convolved(x, weight[k, 0], float(bias[k])), 0.0) for k in range(3)]
        expected.append(mixed(array(projection.linear.weight), np.concatenate(channels)))
    assert_is(nn.Sequential(conv, projection), xs, expected)


@pytest.mark.parametrize("bias", [False, True])
def test_w_m_makes_embeddings_of_a_vector(bias: bool) -> None:
    """u = reshape(W_m v), W_m in R^((l d) x h)."""
    width = 7
    module: Any = drawn(VectorToEmbeddings(width, L, D, bias=bias))
    w_m, b = array(module.linear.weight), array(module.linear.bias) if bias else None
    vectors = np.random.default_rng(2).normal(size=(EXAMPLES, width))
    assert_is(module, vectors, [embeddings(affine(w_m, list(v), b)) for v in vectors])


def test_a_module_that_ends_in_a_vector_goes_through_w_m(xs: Array) -> None:
    """v = relu(W flatten(x) + b), u = reshape(W_m v + b_m)."""
    module = block("mlp", mlp=[6])
    weight, bias, w_m, b_m = (array(parameter) for parameter in module.parameters())
    assert w_m.shape == (L * D, 6)
    expected = []
    for x in xs:
        v = [max(value, 0.0) for value in affine(weight, flat(x), bias)]
        expected.append(embeddings(affine(w_m, v, b_m)))
    assert_is(module, xs, expected)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_dcn_is_the_papers_cross_network(xs: Array, layers: int) -> None:
    """x_(l+1) = x_0 (x_l^T w_l) + b_l on the flattened embeddings, without a residual; u = reshape(W_m x)."""
    module = block("dcn", layers=layers)
    network, w_m = module[0], array(module[1].linear.weight)
    assert w_m.shape == (L * D, M * D)
    assert module[1].linear.bias is None
    expected = []
    for x in xs:
        x0 = current = flat(x)
        for w, b in zip(network.weights, network.biases, strict=True):
            dot = sum(value * float(weight) for value, weight in zip(current, array(w), strict=True))
            current = [value * dot + float(bias) for value, bias in zip(x0, array(b), strict=True)]
        expected.append(embeddings(affine(w_m, current)))
    assert_is(module, xs, expected)


def test_cross_is_the_projected_outer_product(xs: Array) -> None:
    """u = W (x x^T) + b with x in R^(d x m), W in R^(l x d) and b in R^(l x d)."""
    module = block("cross")
    weight, bias = array(module.weight.weight), array(module.bias_LD)
    expected = []
    for x in xs:
        outer = np.zeros((D, D))
        for a in range(D):
            for b in range(D):
                for i in range(M):
                    outer[a, b] += x[i, a] * x[i, b]
        expected.append(mixed(weight, outer) + bias)
    assert_is(module, xs, expected)


def test_a_weighted_sum_has_a_weight_per_module() -> None:
    """sum_i w_i u_i."""
    modules = 3
    shape = EnsembleShape(modules=modules, out=L, embeddings=M, dim=D)
    ensemble: Any = drawn(ENSEMBLES["weighted_sum"]().build(shape))
    outputs = np.random.default_rng(2).normal(size=(modules, EXAMPLES, L, D))
    weights = array(ensemble.weights)
    expected = np.zeros((EXAMPLES, L, D))
    for place in np.ndindex(EXAMPLES, L, D):
        for k in range(modules):
            expected[place] += weights[k] * outputs[(k, *place)]
    found = ensemble([torch.from_numpy(output) for output in outputs], torch.zeros(EXAMPLES, M, D))
    np.testing.assert_allclose(array(found), expected, rtol=1e-10)


def layer(**settings: Any) -> Any:
    config = LayerConfig(modules=("linear", "linear"), ensemble="weighted_sum", **settings)  # type: ignore[arg-type]
    return drawn(DhenLayer(config, LayerShape(embeddings=M, dim=D, numeric=0), dropout=0.0))


@pytest.mark.parametrize("out", [L, M])
def test_a_layer_is_the_norm_of_its_ensemble_and_shortcut(xs: Array, out: int) -> None:
    """y = Norm(sum_i w_i W_i x + shortcut), the shortcut x where lengths agree, and W_n x where they do not."""
    built = layer(out_embeddings=out)
    first, second = (array(module.linear.weight) for module in built.blocks)
    weights = array(built.ensemble.weights)
    norm = array(built.norm.weight), array(built.norm.bias)
    expected = []
    for x in xs:
        shortcut = x if out == M else mixed(array(built.shortcut.linear.weight), x)
        joined = weights[0] * mixed(first, x) + weights[1] * mixed(second, x)
        expected.append(normalized(joined + shortcut, *norm))
    found = built(torch.from_numpy(xs), torch.zeros(EXAMPLES, 0, dtype=torch.float64))
    # on the CPU other precisions than fp32 have their norm in fp32
    np.testing.assert_allclose(array(found), np.stack(expected), rtol=1e-5, atol=1e-5)
