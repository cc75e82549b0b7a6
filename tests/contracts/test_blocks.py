"""Every interaction module keeps the contract: shapes, costs that torch agrees with, gradients, round trips."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dhen.blocks import BLOCKS, BlockShape, DropoutBlockConfig
from dhen.blocks.attention import Encoder
from dhen.config import LayerConfig
from dhen.cost import ATTENTION, dense_parameters, headline_flops
from dhen.ops.pairwise import PairwiseDots
from dhen.values import parse
from search.field_docs import field_docs

SHAPES = [
    BlockShape(embeddings=5, dim=8, out=3),
    BlockShape(embeddings=1, dim=4, out=4),
    BlockShape(embeddings=12, dim=4, out=1),
]
BATCH = 3

every_block = pytest.mark.parametrize("kind", sorted(BLOCKS))
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@every_block
@every_shape
def test_maps_m_embeddings_to_l(kind: str, shape: BlockShape) -> None:
    block = BLOCKS[kind]().build(shape, dropout=0.0)
    u_BLD = block(torch.randn(BATCH, shape.embeddings, shape.dim))
    assert u_BLD.shape == (BATCH, shape.out, shape.dim)
    assert u_BLD.isfinite().all()


@every_block
@every_shape
def test_cost_is_what_torch_counts(kind: str, shape: BlockShape) -> None:
    config = BLOCKS[kind]()
    block = config.build(shape, dropout=0.0).train()
    with FlopCounterMode(display=False) as counter:
        block(torch.randn(BATCH, shape.embeddings, shape.dim))
    rows = config.cost(shape)
    assert headline_flops(rows) * BATCH == counter.get_total_flops()
    assert dense_parameters(rows) == sum(parameter.numel() for parameter in block.parameters())
    assert len({row.name for row in rows}) == len(rows)


@every_block
def test_every_parameter_learns(kind: str) -> None:
    torch.manual_seed(0)
    shape = SHAPES[0]
    block = BLOCKS[kind]().build(shape, dropout=0.0)
    block(torch.randn(64, shape.embeddings, shape.dim)).square().sum().backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@every_block
def test_examples_do_not_mix(kind: str) -> None:
    torch.manual_seed(0)
    block = BLOCKS[kind]().build(SHAPES[0], dropout=0.0).eval()
    x_BMD = torch.randn(BATCH, SHAPES[0].embeddings, SHAPES[0].dim)
    alone = torch.cat([block(x_BMD[i : i + 1]) for i in range(BATCH)])
    torch.testing.assert_close(block(x_BMD), alone)


@every_block
def test_is_exported_for_any_number_of_examples(kind: str) -> None:
    """`export --format pt2` compiles the graph; `len(tensor)` in a forward pass would make a constant of it."""
    torch.manual_seed(0)
    shape = SHAPES[0]
    block = BLOCKS[kind]().build(shape, dropout=0.0).eval()
    given = (torch.randn(4, shape.embeddings, shape.dim),)
    with torch.no_grad():
        program = torch.export.export(block, given, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        for examples in (1, 7):
            x_BMD = torch.randn(examples, shape.embeddings, shape.dim)
            torch.testing.assert_close(program.module()(x_BMD), block(x_BMD))


@every_block
def test_config_round_trips_and_refuses_unknown_keys(kind: str) -> None:
    config = BLOCKS[kind]()
    assert config.kind == kind
    assert parse(BLOCKS[kind], config.to_dict(), kind) == config
    with pytest.raises(ValueError, match="unknown key 'widht'"):
        parse(BLOCKS[kind], {"widht": 3}, kind)


@every_block
def test_settings_are_documented(kind: str) -> None:
    assert BLOCKS[kind].__doc__
    assert BLOCKS[kind].model_fields.keys() - {"kind"} <= field_docs(BLOCKS[kind]).keys()


@every_block
def test_has_a_dropout_of_its_own_where_there_is_any(kind: str) -> None:
    """A setting that does nothing is none."""
    x_BMD = torch.randn(BATCH, SHAPES[0].embeddings, SHAPES[0].dim)
    outputs = []
    for p in (0.0, 0.5):
        torch.manual_seed(0)
        outputs.append(BLOCKS[kind]().build(SHAPES[0], dropout=p).train()(x_BMD))
    assert issubclass(BLOCKS[kind], DropoutBlockConfig) != torch.equal(*outputs)


@every_block
def test_stands_in_a_layer(kind: str) -> None:
    assert LayerConfig(modules=(kind,)).modules[0] == BLOCKS[kind]()  # type: ignore[arg-type]


def test_attention_products_are_counted_apart() -> None:
    """A fused kernel would hide them from torch's counter; they have a kind of their own."""
    shape = BlockShape(embeddings=5, dim=8, out=3)
    config = BLOCKS["attention"](kind="attention")
    rows = config.cost(shape)
    products = [row.flops for row in rows if row.kind == ATTENTION]
    assert products == [2 * 5 * 5 * 8, 2 * 5 * 5 * 8]


def test_attention_is_torchs_encoder_layer() -> None:
    torch.manual_seed(0)
    encoder = Encoder(8, 2, 16, dropout=0.0)
    peer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    names = {
        "qkv": "self_attn.in_proj",
        "output": "self_attn.out_proj",
        "feedforward.0": "linear1",
        "feedforward.1": "linear2",
        "norms.0": "norm1",
        "norms.1": "norm2",
    }
    ours = encoder.state_dict()
    theirs = {
        peer_name + (("_" if "in_proj" in peer_name else ".") + kind): ours[f"{name}.{kind}"]
        for name, peer_name in names.items()
        for kind in ("weight", "bias")
    }
    peer.load_state_dict(theirs)
    x_BMD = torch.randn(BATCH, 5, 8)
    torch.testing.assert_close(encoder(x_BMD), peer(x_BMD))


def test_paper_cross_is_the_outer_product_of_the_embeddings() -> None:
    torch.manual_seed(0)
    shape = BlockShape(embeddings=4, dim=3, out=2)
    block = BLOCKS["cross"]().build(shape, dropout=0.0)
    x_MD = torch.randn(4, 3)
    weight_LD, bias_LD = block.weight.weight, block.bias_LD  # type: ignore[union-attr]
    expected = weight_LD @ (x_MD.T @ x_MD) + bias_LD
    torch.testing.assert_close(block(x_MD.unsqueeze(0))[0], expected)


def test_dlrm_dots_are_all_pairs() -> None:
    x_MD = torch.randn(4, 3)
    expected = [float(x_MD[i] @ x_MD[j]) for i in range(4) for j in range(i + 1, 4)]
    output = PairwiseDots(4, rank=0)(x_MD.unsqueeze(0))[0]
    torch.testing.assert_close(output[:6], torch.tensor(expected))
    torch.testing.assert_close(output[6:], x_MD.flatten())


@pytest.mark.parametrize("rank", [0, 3])
def test_gradients_of_pairwise_dots(rank: int) -> None:
    torch.manual_seed(0)
    module = PairwiseDots(5, rank).double()
    x_BMD = torch.randn(BATCH, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x_BMD,))
