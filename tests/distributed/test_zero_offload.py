"""ZeRO-Offload: gradients leave while backward goes on, the host updates, and a delay is one step to the bit."""

from __future__ import annotations

import math
from collections import deque
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import on_ranks
from torch import Tensor, nn

from dhen.members import cross_entropy
from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema, Table
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy
from trials.training.distributed import zero_offload
from trials.training.distributed.engine import DenseBatch, DenseInputs, part_of, take_tables
from trials.training.distributed.parallelize import ParallelStep, device_mesh, parallelize
from trials.training.distributed.zero_offload import HostOptimizer, ZeroOffload
from trials.training.distributed_step import executed_strategy

STEPS, EXAMPLES, LAYERS, AFTER = 12, 24, 3, 4
SCHEMA = FeatureSchema(tables=tuple(Table(name=name, rows=9) for name in "abc"), numeric=("x", "y"))
LAYER = {"modules": ["dcn_v2", "dlrm"], "out_embeddings": 3, "raw_numeric": True}
MODEL = parse_model({"embedding_dim": 8, "layers": [LAYER] * LAYERS, "dropout": 0.0}, "test")
OFFLOAD = Strategy(dense="zero_offload")
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bf16, sent in fp32": {"precision": "bf16", "all_reduce_precision": "fp32"},
}

CLOSE, CLOSE_IN_BF16 = 1e-3, 0.3
"""How far weights may be apart, as a share of the way that they have come."""


def config(precision: str = "fp32", **more: Any) -> TrainingConfig:
    settings = PRECISIONS[precision] | {"learning_rate": 0.01, "weight_decay": 0.1} | more
    return TrainingConfig.model_validate(settings)


DELAYED = config(delayed_update=True)


@pytest.fixture(autouse=True)
def delayed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_offload, "DELAY_AFTER", AFTER)


def model() -> nn.Module:
    torch.manual_seed(0)
    built = build_model(MODEL, SCHEMA).train()
    take_tables(built)
    return built


def batch(number: int, rank: int = 0, ranks: int = 1) -> DenseBatch:
    generator = torch.Generator().manual_seed(number)

    def part(*shape: int) -> Tensor:
        return torch.randn(EXAMPLES, *shape, generator=generator).tensor_split(ranks)[rank].clone()

    return DenseBatch(DenseInputs((part(3, 8).requires_grad_(),), part(2)), (part() > 0).float())


def trained(step: ParallelStep, rank: int = 0, ranks: int = 1, rates: bool = True) -> dict[str, Tensor]:
    """The weights after steps whose learning rate falls, which is set while an update may be under way."""
    for number in range(STEPS):
        for group in step.engine.optimizer.param_groups:
            group["lr"] = rate(number)
        step.forward_backward(batch(number, rank, ranks))
        step.update()
    return step.engine.weights()


def rate(number: int) -> float:
    return 0.01 * (1 - number / STEPS)


def simulated(delay: int) -> dict[str, Tensor]:
    """The same by plain PyTorch, from gradients of weights that lack `delay` updates after the first steps."""
    peer, masters = model(), model()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.01, weight_decay=0.1)
    earlier: deque[dict[str, Tensor]] = deque()
    for number in range(STEPS):
        peer.zero_grad()
        examples = batch(number)
        cross_entropy(peer(examples.inputs), examples.label_B, None).backward()  # type: ignore[no-untyped-call]
        earlier.append({name: tensor.clone() for name, tensor in masters.state_dict().items()})
        for mine, other in zip(masters.parameters(), peer.parameters(), strict=True):
            mine.grad = other.grad
        optimizer.param_groups[0]["lr"] = rate(number)
        optimizer.step()
        wait = delay if number >= AFTER else 0
        peer.load_state_dict(masters.state_dict() if not wait else earlier[-wait])
    return masters.state_dict()


def apart(mine: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The distance of two sets of weights, as a share of how far the second have come."""
    assert mine.keys() == other.keys()
    start = model().state_dict()
    gap, way = (
        sum(float((one[name] - two[name]).square().sum()) for name in start)
        for one, two in ((mine, other), (other, start))
    )
    return math.sqrt(gap / way)


def leaving_order(step: ParallelStep, examples: DenseBatch, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in a backward pass: a bucket leaves for the host, the backward pass of a segment begins."""
    engine, events = step.engine, []
    assert isinstance(engine, ZeroOffload)
    names = ["features", *(f"layer{index}" for index in range(LAYERS)), "head"]
    take = HostOptimizer.take

    def noted(host: HostOptimizer, index: int, *rest: Any) -> Any:
        events.append(f"{names[index]} leaves")
        return take(host, index, *rest)

    def follow(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(lambda _: events.append(f"backward of {name}"))  # type: ignore[no-untyped-call]

    layers = engine.module.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda *args, index=index: follow(f"layer{index}", *args))
    monkeypatch.setattr(HostOptimizer, "take", noted)
    step.forward_backward(examples)
    step.update()
    return events


def test_the_last_layers_gradients_leave_before_backward_has_come_to_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one rank each layer's gradients leave before the backward pass of the layer before begins."""
    events = leaving_order(parallelize(model(), OFFLOAD, config()), batch(0), monkeypatch)
    assert events == [
        "head leaves",
        *("backward of layer2", "layer2 leaves", "backward of layer1", "layer1 leaves"),
        *("backward of layer0", "layer0 leaves", "features leaves"),
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_rank_trains_as_plain_dp_does(precision: str) -> None:
    """But for the last bit, as vectors of other lengths end in other places."""
    dp, offloaded = (parallelize(model(), strategy, config(precision)) for strategy in (Strategy(), OFFLOAD))
    assert executed_strategy(offloaded) == OFFLOAD
    plain, mine = trained(dp), trained(offloaded)
    assert apart(mine, plain) < CLOSE


@pytest.mark.parametrize("precision", PRECISIONS)
def test_micro_batches_are_added_up_in_fp32_on_the_host(precision: str) -> None:
    """Each one's gradients arrive in the precision that they are made in; their sum loses nothing more."""
    several, parts = OFFLOAD.replace(micro_batches=3, checkpointing="full"), 3
    step = parallelize(model(), several, config(precision))
    step.forward_backward(batch(0))
    step.update()
    peer = parallelize(model(), Strategy(), config(precision)).engine.module
    sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in peer.parameters()]
    for start in range(0, EXAMPLES, EXAMPLES // parts):
        part = part_of(batch(0), slice(start, start + EXAMPLES // parts))
        loss = cross_entropy(peer(part.inputs), part.label_B, None) / parts
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter, total in zip(peer.parameters(), sums, strict=True):
            total += parameter.grad
            parameter.grad = None
    assert isinstance(step.engine, ZeroOffload)
    arrived = [view for bucket in step.engine.buckets for view in bucket.views(bucket.master.grad)]  # type: ignore[arg-type]
    for mine, expected in zip(arrived, sums, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-8)


def test_the_delay_is_exactly_one_step_after_the_first_ones() -> None:
    mine = trained(parallelize(model(), OFFLOAD, DELAYED))
    assert apart(mine, simulated(1)) < CLOSE
    for other in (0, 2):
        assert apart(mine, simulated(other)) > 0.05
    assert apart(trained(parallelize(model(), OFFLOAD, config())), simulated(0)) < CLOSE


def test_a_delayed_update_goes_on_in_a_thread_while_the_next_step_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread is held up until the next forward and backward pass are over; nothing waits for it before."""
    import threading

    go_on, update = threading.Event(), HostOptimizer._update

    def held_up(host: HostOptimizer, gradients: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert go_on.wait(60)
        update(host, gradients)

    monkeypatch.setattr(zero_offload, "DELAY_AFTER", 0)
    step = parallelize(model(), OFFLOAD, DELAYED)
    before = [parameter.clone() for parameter in step.engine.module.parameters()]
    monkeypatch.setattr(zero_offload.HostOptimizer, "_update", held_up)
    step.forward_backward(batch(0))
    step.update()
    step.forward_backward(batch(1))  # with the weights of before
    assert all(map(torch.equal, step.engine.module.parameters(), before))
    go_on.set()
    step.update()
    assert not any(map(torch.equal, step.engine.module.parameters(), before))


def test_what_reads_weights_waits_for_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation, saving and the check for NaN see the weights after all steps."""
    monkeypatch.setattr(zero_offload, "DELAY_AFTER", 0)
    step, plain = (parallelize(model(), OFFLOAD, DELAYED) for _ in range(2))
    for each in (step, plain):
        each.forward_backward(batch(0))
        each.update()
    saved = step.engine.state()["weight"].pieces
    predicted = plain.engine.predict(batch(1).inputs)
    assert torch.equal(step.engine.predict(batch(1).inputs), predicted)
    undelayed = parallelize(model(), OFFLOAD, config())
    undelayed.forward_backward(batch(0))
    undelayed.update()
    assert torch.equal(undelayed.engine.predict(batch(1).inputs), predicted)
    for mine, other in zip(saved, undelayed.engine.state()["weight"].pieces, strict=True):
        assert torch.equal(mine.values, other.values)
    with torch.no_grad():
        saved[0].values[0] = float("nan")
    assert not step.engine.is_finite()


def test_an_error_in_the_thread_is_raised_where_the_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError("the host is full")

    monkeypatch.setattr(zero_offload, "DELAY_AFTER", 0)
    step = parallelize(model(), OFFLOAD, DELAYED)
    monkeypatch.setattr(HostOptimizer, "_update", broken)
    step.forward_backward(batch(0))
    step.update()
    with pytest.raises(MemoryError, match="the host is full"):
        step.engine.is_finite()


# on two ranks


@patch.object(zero_offload, "DELAY_AFTER", AFTER)
def on_a_rank() -> dict[str, Any]:
    """How far two ranks are from one, with and without delay; what leaves when; whether replicas are equal."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = device_mesh("zero_offload", 1, ranks, "cpu")
    found: dict[str, Any] = {}
    for name, settings, strategy in (
        ("micro-batches", config(), OFFLOAD.replace(micro_batches=2)),
        ("bf16", config("bf16"), OFFLOAD),
        ("delayed", DELAYED, OFFLOAD),
    ):
        step = parallelize(model(), strategy, settings, mesh)
        assert executed_strategy(step) == strategy
        mine = trained(step, rank, ranks)
        if rank == 0:
            alone = trained(parallelize(model(), OFFLOAD, settings))
            found[name] = apart(mine, alone)
        for parameter in step.engine.module.parameters():
            first = parameter.detach().clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, parameter.detach())
        host = sum(len(piece.values) for piece in step.engine.state()["exp_avg"].pieces)
        found[f"{name} host"] = host / sum(p.numel() for p in step.engine.module.parameters())
    with pytest.MonkeyPatch.context() as monkeypatch:
        step = parallelize(model(), OFFLOAD, config(), mesh)
        found["order"] = leaving_order(step, batch(0, rank, ranks), monkeypatch)
    return found


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Any]:
    found: dict[str, Any] = on_ranks(on_a_rank, 2)
    return found


def test_two_ranks_follow_one(two_ranks: dict[str, Any]) -> None:
    for name in ("micro-batches", "delayed", "bf16"):
        assert two_ranks[name] < (CLOSE_IN_BF16 if name == "bf16" else CLOSE), name
        assert two_ranks[f"{name} host"] == pytest.approx(0.5, abs=0.01), name


def test_on_several_ranks_a_layers_part_leaves_while_backward_goes_on(two_ranks: dict[str, Any]) -> None:
    """One bucket is on its way between ranks: it leaves for the host when the next one is complete."""
    order = two_ranks["order"]
    assert order.index("layer2 leaves") < order.index("backward of layer0")
    assert sorted(event for event in order if event.endswith("leaves")) == sorted(
        f"{name} leaves" for name in ("features", "layer0", "layer1", "layer2", "head")
    )
