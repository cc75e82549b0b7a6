"""Every declaration of memory is what PyTorch really allocates: each module, ensemble, norm and model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dhen.advanced_dlrm import AdvancedDlrmConfig
from dhen.batch import FeatureBatch
from dhen.blocks import BLOCKS, BlockConfig
from dhen.config import DhenConfig, LayerConfig, ModelConfig
from dhen.dhen_model import DhenLayer, LayerShape, taped_layer
from dhen.ensembles import ENSEMBLES
from dhen.inputs.lift import looked_up
from dhen.model import build_model, taped_model
from dhen.ops.norm import pools
from dhen.schema import FeatureSchema, Table
from dhen.tape import Footprint, TapedSegment, TapeSetting, replay
from trials.planner.memory_counter import MemoryCounter

BATCH = 64
TOLERANCE = 0.01
"""Of what PyTorch allocates: the loss and some numbers per example are not declared."""
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "attention": [{"heads": 1}, {"heads": 4}],
    "cin": [{"maps": [8]}, {"maps": [4, 8, 2]}],
    "conv": [{"channels": 2, "kernel": 5}, {"channels": 1, "activation": "none"}, {"activation": "none"}],
    "dcn": [{"layers": 1}, {"layers": 5}],
    "dcn_mix": [{"layers": 2, "experts": 2}],
    "dcn_v2": [{"layers": 3}, {"layers": 2, "rank": 8}],
    "dlrm": [{"rank": 4}],
    "factorized": [{"widths": [32]}],
    "gated_cross": [{"layers": 3}],
    "pnn": [{"products": "inner", "mlp": [16]}, {"products": "outer"}],
    "sparse_attention": [
        {"block_size": 2},
        {"layout": "sliding_window", "block_size": 3, "heads": 1},
        {"layout": "fixed", "block_size": 2, "local_blocks": [2], "heads": 4, "per_head": True},
        {"layout": "variable", "block_size": 1, "local_blocks": [3, 1], "global_positions": [7]},
        {"layout": "given", "given": ["1100", "0100", "0011", "1001"]},
    ],
    "sparse_moe": [{"active": 1, "hidden": 16}],
    "token_mixing": [{"tokens": 1}, {"tokens": 8}],
    "two_stream": [{"first": [32], "heads": 1}],
}
"""Beside each module's defaults."""
LAYERS = [
    *(
        LayerConfig(modules=({"kind": kind, **more},))
        for kind, block in BLOCKS.items()
        if block.write is not BlockConfig.write
        for more in [{}, *SETTINGS.get(kind, [])]
    ),  # type: ignore[arg-type]
    *(
        LayerConfig(modules=("dlrm", "linear", "conv"), ensemble=ensemble, raw_numeric=True)  # type: ignore[arg-type]
        for ensemble in ENSEMBLES
    ),
    LayerConfig(modules=("mlp", "mlp"), norm="none", shortcut=False),  # type: ignore[arg-type]
    LayerConfig(modules=({"kind": "mlp", "dropout": 0.2}, "mlp")),  # type: ignore[arg-type]
    LayerConfig(modules=("cross",), out_embeddings=12),  # type: ignore[arg-type]
    LayerConfig(modules=({"kind": "sparse_attention", "block_size": 3},), raw_numeric=True),  # type: ignore[arg-type]
    LayerConfig(modules=("linear",), norm="rms", raw_numeric=True),  # type: ignore[arg-type]
    LayerConfig(modules=("linear",), norm="rms", norm_placement="pre"),  # type: ignore[arg-type]
    LayerConfig(modules=("dlrm", "linear"), norm_placement="pre", raw_numeric=True),  # type: ignore[arg-type]
]
SHARED = [
    LayerConfig(modules=("linear", "mlp"), raw_numeric=True, norm="rms"),  # type: ignore[arg-type]
    LayerConfig(modules=("attention",), out_embeddings=12),  # type: ignore[arg-type]
    LayerConfig(modules=("dlrm", "conv"), norm_placement="pre", shortcut=False),  # type: ignore[arg-type]
]
"""Also at several members."""
SETTINGS_OF_A_LAYER = ((torch.float32, 0.0), (torch.bfloat16, 0.1))
"""Precision and dropout."""


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declarations assume several (`dhen.ops.norm`)."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


class _Sum(torch.autograd.Function):
    """A loss that keeps nothing and makes one gradient, as the next layer would."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.like = (y.shape, y.dtype)
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return torch.ones(shape, dtype=dtype)


class _Made(torch.autograd.Function):
    """An input that nobody holds but who reads it, as the segment before makes it."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.ones(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.ones(()), None, None


def allocated(run: Callable[[Tensor], Tensor], given: list[Tensor], leaves: list[Tensor]) -> dict[str, int]:
    """Bytes that forward and backward allocate beside what is given; the output stays alive to the end."""
    seed = torch.ones((), requires_grad=True)
    with MemoryCounter() as counter:
        counter.label([*given, *leaves, pools()], "given")
        there = counter.total
        counter.start_over("forward")
        y = run(seed)
        forward, both = counter.peak - there, counter.total - there
        loss = _Sum.apply(y)  # type: ignore[no-untyped-call]
        counter.start_over("backward")
        kept_alive = torch.autograd.grad([loss], [seed, *leaves], allow_unused=True)
        found = {
            "forward": forward,
            "kept": both - y.untyped_storage().nbytes(),
            "backward": counter.peak - there,
        }
        del kept_alive
    return found


def declared(taped: TapedSegment) -> tuple[Footprint, dict[str, int]]:
    """The same from the tape; the output, alive all the time here, where nothing saves it."""
    footprint = replay(taped.tape, taped.output).at(BATCH)
    saved = any(taped.output in operation.saves for operation in taped.tape.operations)
    return footprint, {
        "forward": footprint.forward_peak,
        "kept": footprint.kept,
        "backward": footprint.backward_peak_with_gradients + (0 if saved else footprint.output),
    }


def assert_close(found: dict[str, int], real: dict[str, int]) -> None:
    for what, size in real.items():
        assert abs(found[what] - size) <= TOLERANCE * size + 64, (what, found[what], size)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: "-".join(block.kind for block in layer.modules))
def test_a_layer_allocates_what_its_tape_says(layer: LayerConfig) -> None:
    """With its defaults at a larger shape, with other settings at a smaller one."""
    defaults = all(block == type(block)() for block in layer.modules)
    embeddings, dim = (80, 16) if defaults else (12, 16)
    assert_declared(layer, LayerShape(embeddings=embeddings, dim=dim, numeric=5))


@pytest.mark.parametrize(
    ("layout", "heads", "embeddings"),
    [
        ("bigbird", 4, 17),
        ("bigbird", 1, 83),
        ("sliding_window", 1, 17),
        ("sliding_window", 4, 83),
        ("fixed", 4, 83),
    ],
)
def test_a_layer_whose_peak_is_attention_in_blocks_does_so_too(
    layout: str, heads: int, embeddings: int
) -> None:
    """All else in it is small. The last block of 83 embeddings has padding; 17 are one block but for `fixed`."""
    module = {"kind": "sparse_attention", "layout": layout, "heads": heads, "feedforward": 1}
    layer = LayerConfig(modules=(module,), out_embeddings=1, norm="none", shortcut=False)  # type: ignore[arg-type]
    assert_declared(layer, LayerShape(embeddings=embeddings, dim=8, numeric=5))


@pytest.mark.parametrize("parting", [True, False])
@pytest.mark.parametrize("layer", SHARED, ids=lambda layer: "-".join(m.kind for m in layer.modules))
def test_a_layer_that_members_share_does_so_too(layer: LayerConfig, parting: bool) -> None:
    assert_declared(layer, LayerShape(embeddings=12, dim=8, numeric=5, members=3, parting=parting))


class Alone:
    """A rank of several that split modules, as far as its memory goes: the others send what it has."""

    rank, size = 0, 2

    def sum_(self, x: Tensor) -> None:
        assert x.is_contiguous()

    def gather(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return x.new_ones(self.size, *x.shape)


@pytest.mark.parametrize(
    "layer",
    [layer for layer in LAYERS if any(type(block).split is not BlockConfig.split for block in layer.modules)],
    ids=lambda layer: "-".join(module.kind for module in layer.modules),
)
def test_a_rank_that_has_a_part_of_a_layer_allocates_what_its_tape_says(layer: LayerConfig) -> None:
    assert_declared(layer, LayerShape(embeddings=12, dim=16, numeric=5), ranks=2)


def assert_declared(layer: LayerConfig, shape: LayerShape, ranks: int = 1) -> None:
    size = (BATCH * shape.rows, shape.embeddings, shape.dim)
    for dtype, dropout in SETTINGS_OF_A_LAYER:
        module = DhenLayer(layer, shape, dropout=dropout).to(dtype).train()
        if ranks > 1:
            module.split(Alone())
        raw_BK = torch.ones(BATCH, 5, dtype=dtype)

        def run(seed: Tensor, module: nn.Module = module, raw_BK: Tensor = raw_BK) -> Tensor:
            x_BMD = _Made.apply(seed, size, raw_BK.dtype)  # type: ignore[no-untyped-call]
            return module(x_BMD, raw_BK)  # type: ignore[no-any-return]

        taped = taped_layer(layer, shape, dropout, TapeSetting(dtype.itemsize, "cpu", ranks))
        assert taped.tape is not None
        assert_has_the_shapes_of(module, [taped.tape])
        footprint, found = declared(taped)
        found["forward"] += footprint.input
        given = [raw_BK, *module.buffers()]
        assert_close(found, allocated(run, given, list(module.parameters())))
        assert footprint.discarding_peak <= footprint.forward_peak
        assert footprint.backward_peak <= footprint.backward_peak_with_gradients
        assert (
            footprint.backward_peak <= footprint.recomputed_peak <= footprint.backward_peak + footprint.input
        )


def assert_has_the_shapes_of(module: nn.Module, tapes: list[Any]) -> None:
    """Those of all parameters and buffers but the tables'."""
    parameters = [p.shape for name, p in module.named_parameters() if "tables" not in name]
    found = [shape for tape in tapes for shape in tape.parameters]
    assert sorted(found) == sorted((shape[0], shape[1:].numel()) for shape in parameters)
    buffers = sum(b.nbytes for name, b in module.named_buffers() if "tables" not in name)
    assert buffers == sum(tape.buffer_bytes for tape in tapes)


SCHEMA = FeatureSchema(
    tables=(
        *(Table(name=f"c{i}", rows=50 if i % 2 else 200) for i in range(6)),
        *(Table(name=f"{name}__bucket", rows=34, buckets=True) for name in "abc"),
        Table(name="bag", rows=800, multi_hot=True),
    ),
    numeric=tuple("abcde"),
)
MODELS: list[ModelConfig] = [
    DhenConfig(layers=(LayerConfig(modules=("linear",)),), dropout=0.1),  # type: ignore[arg-type]
    *(
        DhenConfig(
            layers=(LayerConfig(modules=("linear",)),),  # type: ignore[arg-type]
            head=(64, 32),
            dropout=dropout,
            members=3,
            members_from=members_from,
        )
        for members_from, dropout in [(0, 0.1), (1, 0.0)]
    ),
    AdvancedDlrmConfig(),
    AdvancedDlrmConfig(experts=3, rank=4, dropout=0.1),
    AdvancedDlrmConfig(experts=2, mlp=(64,)),
    DhenConfig(layers=(LayerConfig(modules=("linear",)),), table_dim_exponent=0.5),  # type: ignore[arg-type]
    DhenConfig(layers=(LayerConfig(modules=("linear",)),), buckets="apart"),  # type: ignore[arg-type]
    AdvancedDlrmConfig(table_dim_exponent=0.5, buckets="apart"),
    DhenConfig(layers=(LayerConfig(modules=("linear",)),), buckets="interpolated"),  # type: ignore[arg-type]
    AdvancedDlrmConfig(table_dim_exponent=0.5, buckets="interpolated"),
]

CASES = [(config, SCHEMA) for config in MODELS]
# all tables of a single value are shorter than the longest, but those that are summed into the numeric embedding
SMALL_BAG = FeatureSchema(
    tables=tuple(
        table.replace(rows=20 if table.multi_hot else table.rows if table.buckets else 2000)
        for table in SCHEMA.tables
    ),
    numeric=SCHEMA.numeric,
)
CASES.append((DhenConfig(layers=(LayerConfig(modules=("linear",)),), table_dim_exponent=0.5), SMALL_BAG))  # type: ignore[arg-type]


class _Given(nn.Module):
    def __init__(self, embeddings: list[Tensor]) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, batch: FeatureBatch) -> list[Tensor]:
        return list(self.embeddings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("config", "schema"), CASES, ids=[config.family for config, _ in CASES])
def test_features_and_head_allocate_what_their_tapes_say(
    config: ModelConfig, schema: FeatureSchema, dtype: torch.dtype
) -> None:
    """Of a whole model what forward keeps, and of its features alone everything."""
    embeddings = [
        torch.ones(BATCH, len(places), dim, requires_grad=True) for dim, places in looked_up(config, schema)
    ]
    model = build_model(config, schema).train()
    model.features.tables = _Given(embeddings)  # type: ignore[assignment, union-attr]
    model.to(dtype)
    share_BN = torch.ones(BATCH, 3)
    batch = FeatureBatch(
        ids_BT=torch.zeros(BATCH, 9), bags=(), numeric_BK=torch.ones(BATCH, 5), share_BN=share_BN
    )
    given, features, leaves = (
        [batch.numeric_BK, share_BN, *model.buffers()],
        model.features,
        [*embeddings, *model.parameters()],
    )
    first, *others = taped_model(config, schema, TapeSetting(dtype.itemsize, "cpu"))
    of_features = [*embeddings, *features.parameters()]  # type: ignore[union-attr]
    assert_close(declared(first)[1], allocated(lambda _: features(batch, dtype), given, of_features))  # type: ignore[operator]
    kept = sum(declared(taped)[0].kept for taped in (first, *others))
    assert_close({"kept": kept}, {"kept": allocated(lambda _: model(batch), given, leaves)["kept"]})


@pytest.mark.parametrize(("config", "schema"), CASES, ids=[config.family for config, _ in CASES])
def test_a_tape_has_the_shapes_of_all_parameters(config: ModelConfig, schema: FeatureSchema) -> None:
    tapes = [taped.tape for taped in taped_model(config, schema, TapeSetting(4, "cpu"))]
    assert_has_the_shapes_of(build_model(config, schema), tapes)
