"""Memory of a rank that speaks through gloo: what a thread lets go of late, and a model that is being cut."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema
from trials.optim.adamw import all_finite
from trials.planner.memory_counter import PATIENCE, MemoryCounter, MemoryLimitError
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import Ranks, named
from trials.training.distributed_step import DistributedStep
from trials.training.evaluation import _on_host
from trials.training.memory_limit import limited_memory, on_host

NUMBERS = 2**18
SIZE = 4 * NUMBERS
CPU = torch.device("cpu")


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def held_by_a_thread(tensor: Tensor, waits: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """A thread lets go of a tensor, as one of gloo's does when it has its turn, once it was waited for so often.

    Returns whether it has.
    """
    held = [tensor]

    def wait(_: float) -> None:
        nonlocal waits
        waits -= 1
        if waits == 0:
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()

    monkeypatch.setattr("trials.planner.memory_counter.time.sleep", wait)
    return lambda: not held


@pytest.mark.usefixtures("gloo")
def test_what_a_thread_lets_go_of_late_is_no_part_of_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryCounter() as counter:
        sent = torch.zeros(NUMBERS)
        has_let_go = held_by_a_thread(sent, 1, monkeypatch)
        del sent
        kept = torch.zeros(NUMBERS)
        assert has_let_go()
        assert counter.peak < 1.5 * SIZE
    del kept


@pytest.mark.usefixtures("gloo")
def test_an_operation_is_refused_only_after_threads_had_time_to_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MemoryCounter(limit_bytes=SIZE + SIZE // 2):
        sent = torch.zeros(NUMBERS)
        has_let_go = held_by_a_thread(sent, PATIENCE // 2, monkeypatch)
        del sent
        kept = torch.zeros(NUMBERS)
        assert has_let_go()
        with pytest.raises(MemoryLimitError):
            torch.zeros(NUMBERS)
    del kept


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp+cpu_offload"])
def test_a_model_that_is_cut_is_never_on_the_device_as_a_whole(strategy: str) -> None:
    """On one rank a shard is a whole weight: only what is offloaded leaves nothing on the device."""
    model = parse_model({"embedding_dim": 8, "layers": [{"modules": ["mlp"]}] * 2}, "test")
    inputs = FeatureSchema(tables=(), numeric=("x", "y"))
    training = TrainingConfig(batch_size=4, precision="fp32", epochs=1).resolved(100, "fp32")
    job = Job(model=model, features=inputs, log="none", training=training, seed=0)
    with limited_memory(2**30, CPU) as peak_bytes:
        with on_host():
            whole = build_model(model, inputs)
        size = 4 * sum(p.numel() for p in whole.parameters())
        DistributedStep(whole, job, named(strategy), Ranks(), where=CPU)
        assert peak_bytes() <= (size // 10 if "offload" in strategy else 1.1 * size)


def test_scores_of_a_split_take_nothing_of_the_device() -> None:
    with limited_memory(2**30, CPU) as peak_bytes:
        assert len(_on_host(torch.zeros(1000) for _ in range(50))) == 50_000
        assert peak_bytes() < 3 * 4000


def test_a_look_for_nan_takes_no_memory_and_finds_it() -> None:
    weights = torch.zeros(NUMBERS)
    with MemoryCounter() as counter:
        assert all_finite(weights)
        assert counter.total == SIZE  # the storage is seen as soon as it has a view
        assert counter.peak < SIZE + 100
    assert all_finite(weights[:0])
    for wrong in (float("nan"), float("inf"), float("-inf")):
        weights[7] = wrong
        assert not all_finite(weights)
