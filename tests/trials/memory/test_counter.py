"""The counter: what is alive, what was the most, of which kind; real and fake tensors count alike."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trials.planner.memory_counter import HOST, OTHER, MemoryCounter


def test_what_is_freed_goes_down_and_the_peak_stays_and_a_storage_counts_once() -> None:
    with MemoryCounter() as counter:
        a = torch.zeros(100)
        b = a + 1
        assert counter.total == 800
        del a
        assert counter.total == 400
        b = b * 2
        assert (counter.total, counter.peak) == (400, 800)
        del b
        whole = torch.zeros(10, 10)
        views = [whole[0], whole.T, whole.view(-1), *whole.split(2)]
        whole.add_(1)
        del whole
        assert counter.total == 400
        del views
        assert counter.total == 0


def test_resizing_a_storage_counts() -> None:
    """As `fully_shard` frees and gathers parameters; outside of the counter nothing is left behind."""
    original = torch.UntypedStorage.resize_
    with MemoryCounter() as counter:
        x = torch.zeros(100)
        x.untyped_storage().resize_(0)
        assert counter.total == 0
        with counter.new_are("gathered"):
            x.untyped_storage().resize_(400)
        assert counter.by_kind["gathered"] == 400
    assert torch.UntypedStorage.resize_ is original


def test_what_was_there_before_counts_once_it_is_labelled() -> None:
    before = torch.zeros(50)
    with MemoryCounter() as counter:
        temporary = before + 1
        assert counter.total == 200
        counter.label([before, temporary], "parameters")
        assert counter.by_kind == {"parameters": 400, OTHER: 0}
        counter.label([before], "gradients")
        assert (counter.by_kind["parameters"], counter.by_kind["gradients"]) == (200, 200)


def test_the_host_has_a_count_of_its_own() -> None:
    with MemoryCounter() as counter:
        with counter.new_are(HOST):
            kept = [torch.zeros(100), torch.zeros(100)]
        del kept[0]
        x = torch.zeros(10)
        assert (counter.total, counter.peak, counter.by_kind[HOST], counter.host_peak) == (40, 40, 400, 800)
        counter.label([x], HOST)
        assert (counter.total, counter.by_kind[HOST]) == (0, 440)


def test_each_phase_has_a_peak() -> None:
    with MemoryCounter() as counter:
        torch.zeros(1000)
        kept = torch.zeros(10)
        counter.start_over("forward")
        kept = kept + 1
        counter.begin("backward")
        kept = torch.cat([kept, kept])
        assert counter.peaks == {"forward": 80, "backward": 120}
        assert (counter.peak, counter.peak_phase, counter.peak_by_kind[OTHER]) == (120, "backward", 120)


def test_parts_of_sparse_tensors_count() -> None:
    with MemoryCounter() as counter:
        weight = torch.zeros(1000, 4, requires_grad=True)
        torch.nn.functional.embedding(torch.arange(8), weight, sparse=True).sum().backward()
        assert weight.grad.is_sparse
        assert counter.total == weight.nbytes + 8 * 4 * 4 + 8 * 8


@settings(max_examples=20)
@given(widths=st.lists(st.integers(1, 40), min_size=1, max_size=4), batch=st.integers(1, 30))
def test_fake_tensors_count_as_real_ones(widths: list[int], batch: int) -> None:
    def peak() -> int:
        with MemoryCounter() as counter:
            layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise((7, *widths))]
            model = nn.Sequential(*layers)
            optimizer = None
            for _ in range(2):
                loss: Tensor = model(torch.ones(batch, 7)).square().mean()
                loss.backward()
                optimizer = optimizer or torch.optim.AdamW(model.parameters(), fused=True)
                optimizer.step()
            return counter.peak

    real = peak()
    with FakeTensorMode():
        assert peak() == real


def test_an_error_leaves_nothing_behind() -> None:
    original = torch.UntypedStorage.resize_
    with pytest.raises(RuntimeError), MemoryCounter() as counter:
        torch.zeros(3) + torch.zeros(4)
    assert torch.UntypedStorage.resize_ is original
    assert counter.total == 0
