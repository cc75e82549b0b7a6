"""Sparse attention is dense attention under its layout's mask, with its gradients, and costs what torch counts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dhen.blocks import BlockShape
from dhen.blocks.attention import AttentionConfig
from dhen.blocks.sparse_attention import USES, SparseAttentionConfig
from dhen.cost import dense_parameters, headline_flops
from dhen.errors import UserError
from dhen.ops import block_attention
from dhen.ops.block_attention import BlockAttention, flex_runs, flex_values, fused_values
from dhen.ops.block_layout import BlockLayout
from dhen.ops.norm import dropout_scale
from dhen.values import parse
from spaces.axes import ChoiceAxis
from spaces.nearest import space_size
from spaces.space import Space, SpaceConfig

BATCH, HEAD = 2, 4
GIVEN = ("11000", "01100", "00111", "10010", "00001")
SETTINGS: dict[str, dict[str, Any]] = {
    "fixed": {"local_blocks": (2,)},
    "sliding_window": {},
    "bigbird": {"random_blocks": 2},
    "variable": {"local_blocks": (1, 2), "global_positions": (3, 90)},
    "given": {"given": GIVEN},
}
every_layout = pytest.mark.parametrize("name", sorted(SETTINGS))


def configured(name: str, **others: Any) -> SparseAttentionConfig:
    return SparseAttentionConfig(layout=name, **SETTINGS[name] | others)  # type: ignore[arg-type]


def parts(qkv: Tensor, heads: int) -> Tensor:
    """Queries, keys and values, each (B, H, M, d)."""
    return qkv.view(*qkv.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)


def masked(qkv: Tensor, layout: BlockLayout) -> Tensor:
    """Dense attention under the layout's mask, written out."""
    q, k, v = parts(qkv, len(layout.heads))
    scores = (q @ k.mT).masked_fill(~layout.mask(), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def assert_equal(layout: BlockLayout, dtype: torch.dtype, **tolerance: float) -> None:
    torch.manual_seed(0)
    width = 3 * HEAD * len(layout.heads)
    qkv = torch.randn(BATCH, layout.embeddings, width).to(dtype).requires_grad_()
    gradient = torch.randn(BATCH, layout.embeddings, width // 3).to(dtype)
    outputs = [BlockAttention(layout)(qkv, 0.0), masked(qkv, layout)]
    gradients = [torch.autograd.grad(output, qkv, gradient)[0] for output in outputs]
    torch.testing.assert_close(*outputs, **tolerance)
    torch.testing.assert_close(*gradients, **tolerance)


@every_layout
def test_it_is_dense_attention_under_the_same_mask(name: str) -> None:
    """The next test varies everything else."""
    for heads, embeddings in ((1, 77), (2, 64), (4, 7), (4, 1)):
        layout = configured(name, heads=heads, block_size=5).layout_over(embeddings)
        assert_equal(layout, torch.float32, rtol=1e-4, atol=1e-5)


def test_it_is_so_in_half_precision_as_far_as_that_goes() -> None:
    assert_equal(configured("bigbird").layout_over(77), torch.bfloat16, rtol=0.1, atol=0.1)


@settings(max_examples=30)
@given(
    name=st.sampled_from(sorted(SETTINGS)),
    embeddings=st.integers(1, 40),
    block_size=st.integers(1, 20),
    heads=st.sampled_from([1, 2, 3]),
    per_head=st.booleans(),
    blocks=st.integers(0, 3),
    seed=st.integers(0, 50),
)
def test_it_is_so_for_every_setting(name: str, embeddings: int, blocks: int, **others: Any) -> None:
    counts = {"window": blocks, "global_blocks": blocks, "random_blocks": blocks}
    config = configured(name, **counts | others)
    assert_equal(config.layout_over(embeddings), torch.float64)


@every_layout
@pytest.mark.parametrize("embeddings", [40, 37])
def test_cost_is_what_torch_counts(name: str, embeddings: int) -> None:
    shape = BlockShape(embeddings=embeddings, dim=16, out=4)
    config = configured(name, block_size=4, heads=2, per_head=True)
    block = config.build(shape, dropout=0.0).train()
    with FlopCounterMode(display=False) as counter:
        block(torch.randn(BATCH, embeddings, 16))
    rows = config.cost(shape)
    assert headline_flops(rows) * BATCH == counter.get_total_flops()
    assert dense_parameters(rows) == sum(parameter.numel() for parameter in block.parameters())
    assert headline_flops(rows) < headline_flops(AttentionConfig().cost(shape))


def test_over_few_embeddings_it_is_the_module_attention() -> None:
    shape = BlockShape(embeddings=15, dim=16, out=4)
    config, dense = SparseAttentionConfig(), AttentionConfig()
    assert config.cost(shape) == dense.cost(shape)
    sparse, peer = config.build(shape, dropout=0.0), dense.build(shape, dropout=0.0)
    peer.load_state_dict(sparse.state_dict())
    x_BMD = torch.randn(BATCH, 15, 16)
    torch.testing.assert_close(sparse(x_BMD), peer(x_BMD))


def test_dropout_keeps_the_mean_and_the_mask() -> None:
    torch.manual_seed(0)
    layout = configured("sliding_window", heads=1, block_size=4, global_blocks=0).layout_over(20)
    attention = BlockAttention(layout)
    qkv = torch.randn(1, 20, 3 * HEAD)
    scaled = qkv * torch.tensor([1.0, 1.0, dropout_scale(0.25)]).repeat_interleave(HEAD)
    drawn = attention(scaled.expand(8000, -1, -1), 0.25)
    assert drawn[0].ne(drawn[1]).any()
    torch.testing.assert_close(drawn.mean(0), attention(qkv, 0.0)[0], rtol=0.05, atol=0.05)


def test_gradients_with_dropout_are_those_of_the_weights_that_were_kept() -> None:
    layout = configured("sliding_window", heads=2, block_size=2).layout_over(9)
    assert layout.padding == 1
    attention = BlockAttention(layout)
    qkv = torch.randn(1, 9, 12, dtype=torch.float64, requires_grad=True)

    def dropped(qkv: Tensor) -> Tensor:
        torch.manual_seed(3)  # the same mask each time
        output: Tensor = attention(qkv, 0.5)
        return output

    assert torch.autograd.gradcheck(dropped, (qkv,), fast_mode=True)


@every_layout
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_the_same_where_it_runs(name: str) -> None:
    """Its forward runs on CPUs too; there it is not used, since its backward does not."""
    torch.manual_seed(0)
    layout = configured(name, heads=2, block_size=16, per_head=True).layout_over(150)
    qkv = torch.randn(BATCH, 150, 6 * 16)
    flexed = flex_values(*parts(qkv, 2), layout).transpose(1, 2).flatten(2)
    torch.testing.assert_close(flexed, BlockAttention(layout)(qkv, 0.0), rtol=1e-4, atol=1e-5)


def test_more_examples_than_a_gpus_grid_has_places_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 11, 2, 5, 4)
    whole = fused_values(q, k, v, 0.0)
    monkeypatch.setattr(block_attention, "MOST_EXAMPLES", 4)
    torch.testing.assert_close(fused_values(q, k, v, 0.0), whole)


def test_flex_attention_is_used_where_it_trains() -> None:
    assert flex_runs("cuda", 16, 0.0)
    assert not flex_runs("cpu", 16, 0.0)
    assert not flex_runs("cuda", 8, 0.0)
    assert not flex_runs("cuda", 16, 0.1)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"layout": "given"}, "needs its rows"),
        ({"layout": "given", "given": ["110", "01"]}, "row 0 is '110'; 2 rows need 2 characters"),
        ({"layout": "given", "given": ["1x", "01"]}, "row 0 is '1x'"),
        ({"layout": "given", "given": ["11", "00"]}, "row 1 attends to nothing"),
        ({"layout": "given", "given": [11, 10]}, "texts in quotes"),
        ({"layout": "given", "given": 5}, "texts in quotes"),
        ({"layout": "bigbrid"}, "'fixed', 'sliding_window', 'bigbird', 'variable' or 'given'"),
        ({"block_size": 0}, "greater than 0"),
        ({"layout": "fixed", "local_blocks": [0]}, "greater than 0"),
        ({"windw": 1}, "Did you mean 'window'"),
    ],
)
def test_a_bad_layout_is_refused_with_a_remedy(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(SparseAttentionConfig, settings_, "sparse_attention")


def test_heads_must_divide_the_dimension() -> None:
    with pytest.raises(ValueError, match=r"sparse_attention with heads=3 .* heads that do: \[1, 2, 4"):
        SparseAttentionConfig(heads=3).check(16)


def test_settings_that_a_layout_does_not_use_have_no_value() -> None:
    config = SparseAttentionConfig(layout="sliding_window", random_blocks=7, seed=3, local_blocks=(9,))
    assert config == SparseAttentionConfig(layout="sliding_window")
    assert SparseAttentionConfig(random_blocks=0, seed=3) == SparseAttentionConfig(random_blocks=0)
    assert SparseAttentionConfig(heads=1, per_head=True) == SparseAttentionConfig(heads=1)
    assert SparseAttentionConfig(seed=3) != SparseAttentionConfig()
    assert config.replace(layout="bigbird", seed=3).seed == 3


@every_layout
def test_every_setting_that_a_layout_uses_changes_it(name: str) -> None:
    others: dict[str, Any] = {
        "block_size": 5,
        "window": 2,
        "local_blocks": (3,),
        "global_blocks": 2,
        "global_positions": (1,),
        "random_blocks": 3,
        "seed": 1,
        "per_head": True,
        "given": ("10", "11"),
    }
    config = configured(name)
    layouts = {config.layout_over(100)}
    for setting in USES[name]:
        layouts.add(config.replace(**{setting: others[setting]}).layout_over(100))
    assert len(layouts) == 1 + len(USES[name])
    for setting in others.keys() - USES[name]:
        assert config.replace(**{setting: others[setting]}) == config


def test_a_space_counts_and_encodes_the_layouts_that_differ() -> None:
    data = {
        "depth": [1],
        "slots": 1,
        "modules": {
            "sparse_attention": {
                "layout": ["bigbird", "sliding_window", "given"],
                "block_size": [2, 4],
                "seed": [5, 6],
                "window": [2, 3],
                "given": [["10", "11"]],
            }
        },
        "ensemble": "sum",
        "out_embeddings": [4],
        "raw_numeric": False,
        "model": {"embedding_dim": [8]},
    }
    space = Space("test", parse(SpaceConfig, data, "test"))
    axes = [axis for axis in space.axes if isinstance(axis, ChoiceAxis)]
    points = [
        dict(zip((axis.name for axis in axes), labels, strict=True))
        for labels in itertools.product(*(axis.labels for axis in axes))
    ]
    candidates = [space.decode(point) for point in points]
    assert all(space.decode(space.encode(candidate)) == candidate for candidate in candidates)
    distinct = {str(candidate.model.to_dict()) for candidate in candidates}
    assert len(distinct) == 2 * 2 * 2 + 2 * 2 + 1
    assert space_size(space).architectures == len(distinct)
