"""Every interaction module keeps the contract: shapes, costs that torch agrees with, gradients, round trips."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dhen.blocks import BLOCKS, BlockShape, DropoutBlockConfig
from dhen.blocks.attention import Encoder
from dhen.config import LayerConfig
from dhen.cost import ATTENTION, dense_parameters, headline_flops
from dhen.ops.pairwise import PairwiseDots
from dhen.ops.split import split_parameters
from dhen.values import parse
from search.log_config import field_docs

SHAPES = [
    BlockShape(embeddings=5, dim=8, out=3),
    BlockShape(embeddings=1, dim=4, out=4),
    BlockShape(embeddings=12, dim=4, out=1),
]
BATCH = 3

SPLIT = {"attention", "conv", "dcn", "dcn_v2", "dlrm", "mlp", "sparse_attention"}
"""Modules that declare how they are split over ranks."""

every_block = pytest.mark.parametrize("kind", sorted(BLOCKS))


@every_block
def test_maps_m_embeddings_to_l_at_the_cost_that_torch_counts(kind: str) -> None:
    for shape in SHAPES:
        config = BLOCKS[kind]()
        block = config.build(shape, dropout=0.0).train()
        with FlopCounterMode(display=False) as counter:
            u_BLD = block(torch.randn(BATCH, shape.embeddings, shape.dim))
        assert u_BLD.shape == (BATCH, shape.out, shape.dim)
        assert u_BLD.isfinite().all()
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
def test_is_exported_for_any_number_of_examples_which_do_not_mix(kind: str) -> None:
    """`export --format pt2` compiles the graph; `len(tensor)` in a forward pass would make a constant of it."""
    torch.manual_seed(0)
    shape = SHAPES[0]
    block = BLOCKS[kind]().build(shape, dropout=0.0).eval()
    given_BMD = torch.randn(4, shape.embeddings, shape.dim)
    with torch.no_grad():
        program = torch.export.export(block, (given_BMD,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        for examples in (1, 7):
            x_BMD = torch.randn(examples, shape.embeddings, shape.dim)
            torch.testing.assert_close(program.module()(x_BMD), block(x_BMD))
        alone = torch.cat([block(x_BMD) for x_BMD in given_BMD.split(1)])
        torch.testing.assert_close(block(given_BMD), alone)


@every_block
def test_its_settings_stand_in_a_layer_round_trip_and_are_documented(kind: str) -> None:
    config = BLOCKS[kind]()
    assert config.kind == kind
    assert LayerConfig(modules=(kind,)).modules[0] == config  # type: ignore[arg-type]
    assert parse(BLOCKS[kind], config.to_dict(), kind) == config
    with pytest.raises(ValueError, match="unknown key 'widht'"):
        parse(BLOCKS[kind], {"widht": 3}, kind)
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


class Together:
    """Ranks that are threads of this process, and split a module."""

    def __init__(self, rank: int, size: int, slots: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._slots, self._barrier = slots, barrier

    def sum_(self, x: Tensor) -> None:
        x.copy_(self.gather(x).sum(dim=0))

    def gather(self, x: Tensor) -> Tensor:
        self._slots[self.rank] = x.detach().clone()
        self._barrier.wait()
        found = torch.stack([slot for slot in self._slots if slot is not None])
        self._barrier.wait()
        return found


Outcome = tuple[Tensor, Tensor, dict[str, Tensor]]
"""The output, and the gradients of the input and of all parameters, by name."""


def on_threads(ranks: int, run: Callable[[Together], Outcome]) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    slots: list[Tensor | None] = [None] * ranks
    barrier = threading.Barrier(ranks, timeout=60)

    def as_rank(rank: int) -> None:
        try:
            found[rank] = run(Together(rank, ranks, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=as_rank, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (kind, settings)
        for kind, block in sorted(BLOCKS.items())
        for settings in ({}, {"rank": 4}, {"heads": 4})
        if settings.keys() <= block.model_fields.keys()
    ],
)
def test_ranks_that_split_it_compute_what_one_does(kind: str, settings: dict[str, int], ranks: int) -> None:
    """Outputs, gradients and weights; without dropout, for which threads have one generator."""
    torch.manual_seed(0)
    config, shape = BLOCKS[kind].model_validate(settings), BlockShape(embeddings=6, dim=8, out=4)
    plain = config.build(shape, dropout=0.0).eval()
    x_BMD, by_u_BLD = torch.randn(BATCH, 6, 8), torch.randn(BATCH, 4, 8)
    parts = [copy.deepcopy(plain) for _ in range(ranks)]

    def passes(block: torch.nn.Module) -> Outcome:
        leaf_BMD = x_BMD.clone().requires_grad_()
        u_BLD = block(leaf_BMD)
        (u_BLD * by_u_BLD).sum().backward()
        assert leaf_BMD.grad is not None
        gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
        return u_BLD.detach(), leaf_BMD.grad, gradients

    def as_rank(group: Together) -> Outcome:
        config.split(parts[group.rank], group)
        return passes(parts[group.rank])

    whole, found = passes(plain), on_threads(ranks, as_rank)
    splits = split_parameters(parts[0])
    assert bool(splits) == (kind in SPLIT)
    two_heads = "attention" in kind and settings.get("heads", 2) == 2
    assert (config.whole(shape, ranks) is None) == (kind in SPLIT and not (two_heads and ranks == 4))
    weights = dict(plain.named_parameters())
    for u_BLD, by_x_BMD, gradients in found:
        torch.testing.assert_close(u_BLD, whole[0])
        torch.testing.assert_close(by_x_BMD, whole[1])
        assert gradients.keys() == whole[2].keys()
    for name, expected in whole[2].items():
        if name in splits:
            of_ranks = [gradients[name] for _, _, gradients in found]
            torch.testing.assert_close(splits[name].joined(of_ranks), expected)
            kept = [dict(part.named_parameters())[name].detach() for part in parts]
            torch.testing.assert_close(splits[name].joined(kept), weights[name].detach(), rtol=0, atol=0)
            assert kept[0].numel() * ranks == weights[name].numel()
        else:
            for _, _, gradients in found:
                torch.testing.assert_close(gradients[name], expected)


@every_block
def test_what_stays_whole_on_ranks_says_why(kind: str) -> None:
    reason = BLOCKS[kind]().whole(SHAPES[0], 7)
    assert reason == "it declares no split" if kind not in SPLIT else "7 does not divide" in reason
