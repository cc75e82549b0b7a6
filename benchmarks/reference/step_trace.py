"""The reference: memory of one real training step, traced under fake tensors and a fake process group.

The model, its wrapping (`trials.training.distributed.parallelize`) and the step are the real ones; tensors have
sizes but no contents and collectives do nothing, so that a step on hundreds of ranks is traced on one in about
a second. `MemoryCounter` counts what rank 0, the fullest, holds. Everything that torch does not promise to keep
is used in this file alone. Left out: what is no tensor (context, workspaces, the allocator's reserve), tables.

Four things are stood in for: DistributedDataParallel, which fake tensors cannot run (`_into_buckets`); random
bits (`trials.planner.memory_counter.same_code_path`); the copy in which gloo reduces and scatters (`_GlooWork`);
and, for `fully_shard` with offload, the copies between host and device, which a CPU does not make: what would
live on the host is left out of the device's count.

Tests and benchmarks check the planner's arithmetic against it; no plan needs it. It is the CPU's code path that
is traced: fused linear maps, dropout on bits (`dhen.ops.linear`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from dhen.config import ModelConfig
from dhen.inputs.lift import looked_up
from dhen.model import build_model
from dhen.schema import FeatureSchema
from dhen.values import Value
from trials.optim.adamw import DTYPES
from trials.planner.memory_counter import HOST, MemoryCounter, same_code_path
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy
from trials.training.distributed.ddp import average_gradients, cast_bucket
from trials.training.distributed.engine import DenseBatch, DenseInputs, take_tables
from trials.training.distributed.parallelize import (
    ParallelStep,
    Replicate,
    device_mesh,
    parallelize,
)
from trials.training.distributed.tensor_parallel import DATA
from trials.training.distributed.zero import Zero, when_accumulated
from trials.training.memory_limit import counted_by

CHUNKS = "torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty"
"""Name of the function that cuts a parameter into shards; made one by one, 256 of each took most of a trace."""

REDUCE_SCATTER = "torch.distributed.reduce_scatter_single"
"""Name of the function through which ZeRO and `fully_shard` reduce and scatter."""


class StepMemory(Value):
    """Bytes of rank 0's tensors in a training step after the first, at the moment of their peak."""

    total: int
    """Bytes on the device."""
    by_kind: dict[str, int]
    """Bytes by what holds them; their sum is `total`."""
    peak_at: str
    """The moment of the peak: `forward of layer0`, `backward of layer3`, `optimizer step`."""
    peaks: dict[str, int]
    """The highest bytes at each such moment."""
    host: int
    """Bytes in host memory, where parameters, gradients and optimizer state are offloaded; at their own peak."""


def trace(
    model: ModelConfig,
    schema: FeatureSchema,
    strategy: Strategy,
    *,
    hosts: int,
    gpus_per_host: int,
    examples_per_rank: int,
    training: TrainingConfig,
) -> StepMemory:
    """Traces two training steps of the dense part under fake tensors; tells the memory of the second.

    Args:
        model: the architecture; dropout is on as it says.
        schema: the inputs; the tables' sizes do not matter.
        strategy: how the model is held.
        hosts: number of hosts of the cluster.
        gpus_per_host: number of ranks per host.
        examples_per_rank: B of one rank's dense part, all micro-batches together.
        training: resolved settings; they say in which precision the dense part computes, sends gradients and
            keeps AdamW's moments.

    Raises:
        ValueError: if this process belongs to a process group already.
    """
    with _process_group(hosts * gpus_per_host):
        mesh = device_mesh(strategy.dense, hosts, gpus_per_host, "cpu", strategy.tensor)
        assert training.precision != "auto"
        sent_in = DTYPES[training.reduction_precision(training.precision)]
        replicate = partial(_into_buckets, sent_in)
        with FakeTensorMode(), patch(CHUNKS, _first_chunk), patch(REDUCE_SCATTER, _gloo_reduce_scatter):
            return measure(model, schema, strategy, mesh, examples_per_rank, training, replicate=replicate)


def measure(
    model: ModelConfig,
    schema: FeatureSchema,
    strategy: Strategy,
    mesh: DeviceMesh | None,
    examples: int,
    training: TrainingConfig,
    *,
    replicate: Replicate = average_gradients,
) -> StepMemory:
    """Runs two training steps of the dense part, on this rank, on the CPU; tells the memory of the second.

    With real tensors, on every rank of `mesh` (from `trials.training.distributed.parallelize.device_mesh`), the
    result is what a real step holds; `trace` calls this function with fake tensors. The arguments are those of
    `trace` and of `parallelize`.
    """
    host = strategy.offload
    # zero_offload says itself what lies on the host; of `fully_shard` this function does
    with MemoryCounter() as counter, counted_by(counter), same_code_path(), _collectives_labelled(counter):
        with counter.new_are("parameters"):
            dense = build_model(model, schema).train()
            take_tables(dense)
            step = parallelize(
                dense, strategy, training, mesh, replicate=partial(_labelled, counter, replicate)
            )
        if isinstance(step.engine, Zero) and strategy.dense != "zero_offload":
            _label_buckets(step.engine, counter)
        with counter.new_are("input_batch"):
            batch = blank_batch(model, schema, examples)
        if host:
            counter.label(dense.parameters(), HOST)
        alone = mesh is None or (mesh[DATA] if strategy.tensor > 1 else mesh).size() == 1
        gradients_stay = strategy.dense == "dp" and alone
        if strategy.fully_sharded or gradients_stay:
            _label_gradients(dense.parameters(), counter, HOST if host else "gradients")
        _one_step(ParallelStep(step.engine, 1), batch, counter, HOST if host else "optimizer_state")
        _label_gradients(_unsharded_parameters(dense), counter, "gradients")
        _follow(dense, counter)
        counter.start_over("features")
        _one_step(step, batch, counter, HOST if host else "gradients")
        return _result(counter)


def blank_batch(model: ModelConfig, schema: FeatureSchema, examples: int) -> DenseBatch:
    """Returns a batch of so many examples, all zeros, as lookups leave it; without weights."""
    embeddings = tuple(
        torch.zeros(examples, len(tables), dim, requires_grad=True)
        for dim, tables in looked_up(model, schema)
    )
    shares = torch.zeros(examples, len(schema.bucketed)) if schema.bucketed else None
    inputs = DenseInputs(embeddings, torch.zeros(examples, len(schema.numeric)), shares)
    return DenseBatch(inputs, torch.zeros(examples))


def _one_step(step: ParallelStep, batch: DenseBatch, counter: MemoryCounter, update_makes: str) -> None:
    """Runs one step as training does: the tables take the embeddings' gradients before the dense part is
    updated."""
    step.forward_backward(batch)
    for embeddings in batch.inputs.embeddings:
        embeddings.grad = None
    counter.begin("optimizer step")
    with counter.new_are(update_makes):
        step.update()


@contextmanager
def _process_group(ranks: int) -> Iterator[None]:
    """Makes a group whose collectives do nothing, seen from rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _GlooWork:
    """A reduction on its way: gloo reduces in a copy, which appears when it is waited for and stays with this."""

    def __init__(self, sent: Tensor) -> None:
        self._sent, self._copy = sent, sent

    def wait(self) -> None:
        """Makes the copy."""
        self._copy = self._sent.clone()


def _gloo_reduce_scatter(
    output: Tensor, input: Tensor, *, op: object, group: object, async_op: bool = False
) -> _GlooWork | None:
    """Holds what gloo holds, and does nothing else; the arguments are those of `torch.distributed`."""
    work = _GlooWork(input)
    if async_op:
        return work
    work.wait()
    return None


def _first_chunk(tensor: Tensor, chunks: int, dim: int) -> list[Tensor]:
    """Returns the shard of rank 0 alone."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // chunks))]


def _labelled(
    counter: MemoryCounter,
    replicate: Replicate,
    model: nn.Module,
    bucket_bytes: int,
    process_group: dist.ProcessGroup | None,
) -> nn.Module:
    with counter.new_are("communication_buffers"):
        return replicate(model, bucket_bytes, process_group)


def _into_buckets(
    sent_in: torch.dtype, model: nn.Module, bucket_bytes: int, _: dist.ProcessGroup | None
) -> nn.Module:
    """Holds what DistributedDataParallel holds, for fake tensors: all gradients lie in buckets, as views."""
    buckets: list[list[Tensor]] = [[]]
    for parameter in reversed(list(model.parameters())):
        if sum(earlier.nbytes for earlier in buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(parameter)
    on_their_way = _CastsInFlight(len(buckets))
    for parameters in buckets:
        _Bucket(parameters, sent_in, on_their_way)
    return model


class _CastsInFlight:
    """Casts of buckets that lie outside of the buckets: possibly none has been reduced before backward ends."""

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._sent: list[Tensor] = []

    def send(self, cast: Tensor) -> None:
        self._sent.append(cast)
        if len(self._sent) == self._buckets:
            self._sent.clear()


class _Bucket:
    """A bucket of gradients: a fresh gradient is copied into its slot and freed; from then on gradients are added
    up there."""

    def __init__(self, parameters: list[Tensor], sent_in: torch.dtype, on_their_way: _CastsInFlight) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self._memory = torch.empty(sum(sizes), dtype=parameters[0].dtype)
        self._missing = self._count = len(parameters)
        self._sent_in, self._on_their_way = sent_in, on_their_way
        for parameter, slot in zip(parameters, torch.split(self._memory, sizes), strict=True):
            when_accumulated(parameter, partial(self._take, slot.view_as(parameter)))

    def _take(self, slot: Tensor, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter.grad is not slot:
            parameter.grad = slot.copy_(parameter.grad)
        self._missing -= 1
        if self._missing:
            return
        self._missing = self._count
        if self._sent_in is not self._memory.dtype:
            self._on_their_way.send(cast_bucket(self._memory, self._sent_in))


@contextmanager
def _collectives_labelled(counter: MemoryCounter) -> Iterator[None]:
    """Labels what `fully_shard` makes to gather and reduce by its kind."""

    def labelled(method: str, kind: str) -> Any:
        original = getattr(FSDPParamGroup, method)

        def run(group: FSDPParamGroup, *args: Any) -> None:
            with counter.new_are(kind):
                original(group, *args)

        return patch.object(FSDPParamGroup, method, run)

    with (
        labelled("unshard", "communication_buffers"),
        labelled("wait_for_unshard", "unsharded_layer"),
        labelled("post_backward", "communication_buffers"),
    ):
        yield


def _label_gradients(parameters: Iterable[Tensor], counter: MemoryCounter, kind: str) -> None:
    for parameter in parameters:
        when_accumulated(parameter, partial(_label_gradient, counter, kind))


def _label_gradient(counter: MemoryCounter, kind: str, parameter: Tensor) -> None:
    assert parameter.grad is not None
    counter.label([parameter.grad], kind)


def _label_buckets(engine: Zero, counter: MemoryCounter) -> None:
    """Labels gradients where they stay, and the own part's, as those of other engines are."""
    for bucket in engine.buckets:
        if bucket.gradients is not None:
            counter.label([bucket.gradients], "communication_buffers")


def _unsharded_parameters(model: nn.Module) -> Iterator[Tensor]:
    """Yields the tensors that `fully_shard` gathers into; there are none before the first step."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from (parameter.unsharded_param for parameter in group.fsdp_params)


def _follow(model: nn.Module, counter: MemoryCounter) -> None:
    """Tells the counter which segment goes forward or backward."""
    for name, module in _segments(model):
        module.register_forward_pre_hook(
            lambda *_, name=name: counter.begin(f"forward of {name}"), prepend=True
        )
        module.register_forward_hook(partial(_follow_backward, counter, name), prepend=True)


def _follow_backward(counter: MemoryCounter, name: str, _: nn.Module, __: Any, output: Tensor) -> None:
    output.register_hook(lambda _: counter.begin(f"backward of {name}"))  # type: ignore[no-untyped-call]


def _segments(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Yields the segments of `trials.planner.segments`; the head's hooks are on its two parts."""
    yield "features", model.get_submodule("features")
    for index, layer in enumerate(getattr(model, "layers", ())):
        yield f"layer{index}", layer
    for name in ("interactions", "mlp", "head", "logit"):
        if hasattr(model, name):
            yield "head", model.get_submodule(name)


def _result(counter: MemoryCounter) -> StepMemory:
    return StepMemory(
        total=counter.peak,
        by_kind={kind: size for kind, size in counter.peak_by_kind.items() if size and kind != HOST},
        peak_at=counter.peak_phase,
        peaks=counter.peaks,
        host=counter.host_peak,
    )
