"""What ranks send under each way of holding: how much, how often, and to whom, seen at PyTorch's collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.reference.step_trace import blank_batch
from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema, Table
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy, named
from trials.training.distributed.engine import take_tables
from trials.training.distributed.parallelize import device_mesh, parallelize

HOSTS, RANKS_PER_HOST, EXAMPLES = 2, 2, 8
RANKS = HOSTS * RANKS_PER_HOST
SCHEMA = FeatureSchema(
    tables=tuple(Table(name=name, rows=9) for name in "abcd"), numeric=("x", "y", "z", "w")
)
LAYER = {"modules": ["mlp"], "out_embeddings": 8}
MODEL = parse_model({"embedding_dim": 16, "layers": [LAYER] * 4, "dropout": 0.0}, "test")
"""Rows that divide by 4, so that `fully_shard` pads little."""
KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
}
NAMES = (
    "dp",
    "zero1",
    "zero2",
    "shard_grad_op",
    "fsdp",
    "hsdp",
    *(f"{name}+micro_batches=4" for name in ("dp", "zero1", "zero2", "fsdp", "hsdp")),
    "fsdp+micro_batches=4+no_sync",
    "hsdp+micro_batches=4+no_sync",
)


class Traffic(TorchDispatchMode):
    """Notes every collective: its kind, the ranks that take part, and the bytes of the whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, list[int], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = KINDS.get(func._opname) if func.namespace == "c10d" else None
        if kind is not None:
            tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg])]
            size = max(t.nbytes for t in tensors if isinstance(t, Tensor))
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            self.sent.append((kind, dist.get_process_group_ranks(group), size))
        return func(*args, **(kwargs or {}))


def dense_model() -> nn.Module:
    model = build_model(MODEL, SCHEMA).train()
    take_tables(model)
    return model


def a_step(strategy: Strategy) -> list[tuple[str, list[int], int]]:
    mesh = device_mesh(strategy.dense, HOSTS, RANKS_PER_HOST, "cpu")
    step = parallelize(dense_model(), strategy, TrainingConfig(precision="fp32"), mesh)
    for _ in range(2):  # DistributedDataParallel orders its buckets after the first step
        batch = blank_batch(MODEL, SCHEMA, EXAMPLES)
        with Traffic() as traffic:
            step.forward_backward(batch)
            step.update()
    return traffic.sent


def every_strategy() -> dict[str, list[tuple[str, list[int], int]]]:
    return {name: a_step(named(name)) for name in NAMES}


@pytest.fixture(scope="module")
def sent() -> dict[str, list[tuple[str, list[int], int]]]:
    found: dict[str, list[tuple[str, list[int], int]]] = on_ranks(every_strategy, RANKS)
    return found


def weights() -> tuple[int, int]:
    """fp32 bytes of all weights, and of those around the layers."""
    model = dense_model()
    layers = sum(p.nbytes for name, p in model.named_parameters() if name.startswith("layers"))
    whole = sum(p.nbytes for p in model.parameters())
    return whole, whole - layers


def volume(sent: list[tuple[str, list[int], int]], kind: str) -> int:
    return sum(size for name, _, size in sent if name == kind)


def weighed(sent: list[tuple[str, list[int], int]]) -> int:
    """Bytes as ZeRO's paper counts them: an all-reduce is a reduce-scatter and an all-gather."""
    return sum(volume(sent, kind) for kind in KINDS.values()) + volume(sent, "all_reduce")


def test_stages_1_and_2_send_as_much_as_plain_data_parallelism(sent: dict[str, Any]) -> None:
    whole, _ = weights()
    assert weighed(sent["dp"]) == 2 * whole
    for stage in ("zero1", "zero2"):
        assert volume(sent[stage], "all_reduce") == 0
        assert weighed(sent[stage]) == pytest.approx(2 * whole, rel=0.001)  # buckets are padded


def test_stage_3_sends_half_as_much_again(sent: dict[str, Any]) -> None:
    """Weights are gathered for forward and for backward; those around the layers stay in between."""
    whole, around = weights()
    assert volume(sent["fsdp"], "reduce_scatter") == pytest.approx(whole, rel=0.01)
    assert weighed(sent["fsdp"]) == pytest.approx(3 * whole - around, rel=0.01)
    assert weighed(sent["shard_grad_op"]) == pytest.approx(2 * whole, rel=0.01)


def test_hsdp_gathers_inside_a_host_and_sums_up_across_hosts(sent: dict[str, Any]) -> None:
    inside, across = [0, 1], [0, 2]  # of rank 0
    for name in ("hsdp", "hsdp+micro_batches=4", "hsdp+micro_batches=4+no_sync"):
        groups = {kind: [group for one, group, _ in sent[name] if one == kind] for kind in KINDS.values()}
        assert groups["all_gather"]
        assert all(group == inside for group in groups["all_gather"] + groups["reduce_scatter"])
        assert all(group == across for group in groups["all_reduce"])
        assert len(groups["all_reduce"]) == 5  # of each layer, and of what lies around them
    assert all(group == [0, 1, 2, 3] for _, group, _ in sent["fsdp"])


def test_hsdp_sends_what_it_sums_up_besides(sent: dict[str, Any]) -> None:
    """In the paper's account a gather and a reduce-scatter of W, and an all-reduce, which passes twice, of W / g:
    1 + 1 / g times FSDP's traffic, 1.125 with 8 ranks per host and 1.5 with these 2."""
    fsdp, hsdp = (volume(sent[name], "reduce_scatter") for name in ("fsdp", "hsdp"))
    once = 2 * fsdp
    assert (2 * hsdp + 2 * volume(sent["hsdp"], "all_reduce")) / once == pytest.approx(
        1 + 1 / RANKS_PER_HOST, rel=0.01
    )


def test_reductions_wait_for_the_last_micro_batch(sent: dict[str, Any]) -> None:
    def times(name: str, kind: str) -> float:
        return volume(sent[f"{name}"], kind) / volume(sent[name.partition("+")[0]], kind)

    assert times("dp+micro_batches=4", "all_reduce") == 1
    assert times("zero1+micro_batches=4", "reduce_scatter") == 1
    assert times("zero2+micro_batches=4", "reduce_scatter") == 4
    assert times("fsdp+micro_batches=4", "reduce_scatter") == 4
    assert times("fsdp+micro_batches=4+no_sync", "reduce_scatter") == 1
    assert times("hsdp+micro_batches=4", "reduce_scatter") == 4
    assert times("hsdp+micro_batches=4", "all_reduce") == 1
    assert times("hsdp+micro_batches=4+no_sync", "reduce_scatter") == 1
    assert times("hsdp+micro_batches=4+no_sync", "all_reduce") == 1
    for name in ("zero1", "zero2"):
        assert times(f"{name}+micro_batches=4", "all_gather") == 1
