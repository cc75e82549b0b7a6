"""A declared memory is kept by counting: training within it, out of memory beyond it, in a real process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from faulty_ranks import everything, real_training
from torch import Tensor, nn

from dhen.errors import UserError
from trials.cluster.cluster import CUDA_CONTEXT_BYTES
from trials.planner.memory_counter import MemoryLimitError
from trials.records.events import FailureEvent, TrainingEvent
from trials.records.task import Task
from trials.runtime.launcher import Launcher
from trials.training.memory_limit import (
    keep_on_host,
    limited_memory,
    needed_and_limit,
    on_host,
    out_of_memory,
)
from trials.training.process_group import check_devices

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return real_training(tmp_path_factory.mktemp("log") / "log", rows=1000)


def train(task: Task, folder: Path, **changes: object) -> TrainingEvent | FailureEvent:
    folder.mkdir()
    last = everything(Launcher().start(task.replace(**changes), folder))[-1]
    assert isinstance(last, (TrainingEvent, FailureEvent))
    return last


def test_training_keeps_to_its_limit_or_says_what_is_lacking(task: Task, tmp_path: Path) -> None:
    free, counted = train(task, tmp_path / "a"), train(task, tmp_path / "b", hbm=2**30)
    assert isinstance(free, TrainingEvent)
    assert isinstance(counted, TrainingEvent)
    assert counted.best == free.best  # counting changes no number
    assert (
        counted.measured.peak_memory_bytes < 2**27 < free.measured.peak_memory_bytes
    )  # tensors alone; the whole process
    peak = counted.measured.peak_memory_bytes
    enough = train(task, tmp_path / "c", hbm=peak)
    assert isinstance(enough, TrainingEvent)
    assert enough.measured.peak_memory_bytes == peak
    short = train(task, tmp_path / "d", hbm=peak - 1)
    assert isinstance(short, FailureEvent)
    assert short.out_of_memory
    assert (short.needed_bytes, short.limit_bytes) == (peak, peak - 1)
    assert "declared for a rank" in short.error


def forward(weight: Tensor, limit_bytes: int) -> None:
    with limited_memory(limit_bytes, CPU):
        (weight @ weight).sum()


def backward(weight: Tensor, limit_bytes: int) -> None:
    with limited_memory(limit_bytes, CPU):
        weight.square().sum().backward()  # type: ignore[no-untyped-call]


def test_the_error_says_where() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError, match=r"outside of backward, at aten\.mm") as caught:
        forward(weight, 16_000)
    assert needed_and_limit(caught.value) == (64 * 64 * 4, 16_000)
    with pytest.raises(MemoryLimitError, match=r"in backward, at aten\."):
        backward(weight, 20_000)


def test_nothing_is_counted_or_refused_without_a_limit() -> None:
    with limited_memory(None, CPU) as peak_bytes:
        assert peak_bytes() > 2**20  # resident: the interpreter is there too
        with on_host():
            assert torch.ones(3).sum() == 3
        keep_on_host([torch.ones(3)])


def test_what_lies_on_the_host_is_left_out() -> None:
    linear = nn.Linear(50, 50, bias=False)
    with limited_memory(25_000, CPU) as peak_bytes:
        with on_host():
            kept: Tensor = torch.ones(100_000) + 1
        keep_on_host(linear.parameters())
        for _ in range(3):
            linear(torch.ones(1, 50)).sum().backward()
        assert len(kept) == 100_000
        assert peak_bytes() < 25_000


def test_lack_of_memory_is_found_behind_other_errors() -> None:
    lack = MemoryLimitError(3, 2, "here")
    outer = RuntimeError("sharding propagation failed")
    outer.__cause__ = lack
    assert out_of_memory(lack) is lack
    assert out_of_memory(outer) is lack
    assert out_of_memory(MemoryError()) is not None
    assert out_of_memory(RuntimeError()) is None


def test_each_rank_needs_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are made up: tests run where there are none."""
    check_devices(8 if not torch.cuda.is_available() else 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(2)
    with pytest.raises(UserError, match="4 ranks on this machine, which has 2 CUDA"):
        check_devices(4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"address": "10.0.0.1"}, "host:port"),
        ({"address": "host:99999"}, "host:port"),
        ({"host": 1}, "of 1 host"),
        ({"hosts": 2, "host": 1}, "with an address"),
        ({"hbm": 0}, "greater than 0"),
    ],
)
def test_impossible_tasks(task: Task, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Task.model_validate(task.to_dict() | changes)


def test_ranks_here(task: Task) -> None:
    four = task.replace(hosts=2, gpus_per_host=2)
    assert [*four.ranks_here] == [0, 1, 2, 3]
    assert [*four.replace(address="h:1", host=1).ranks_here] == [2, 3]


def test_a_gpus_allocator_gets_what_is_declared_but_for_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that a machine without a GPU cannot make: shares are of the device by its number, and stay as
    they are after an error, which is asked what the limit was."""
    total, shares = 80 * 2**30, list[tuple[float, torch.device]]()
    properties = SimpleNamespace(total_memory=total)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5 * 2**30)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append((share, device))
    )
    device = torch.device("cuda", 3)
    with limited_memory(10 * 2**30, torch.device("cuda")) as peak_bytes:
        assert peak_bytes() == 5 * 2**30 + CUDA_CONTEXT_BYTES
    assert shares == [((10 * 2**30 - CUDA_CONTEXT_BYTES) / total, device), (1.0, device)]
    shares.clear()
    with pytest.raises(torch.OutOfMemoryError), limited_memory(2**20, torch.device("cuda")):
        raise torch.OutOfMemoryError
    assert shares == [(0.0, device)]
