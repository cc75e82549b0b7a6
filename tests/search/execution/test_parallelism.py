"""Candidates side by side and their threads, on this machine."""

from __future__ import annotations

import pytest

from search.execution import parallelism as module
from search.execution.parallelism import Parallelism, parallelism
from trials.cluster.machine import cores


@pytest.mark.parametrize(
    ("parallel", "threads", "found"),
    [
        (None, None, (4, 2)),
        (None, 4, (2, 4)),
        (None, 1, (4, 1)),
        (None, 16, (1, 16)),
        (2, None, (2, 4)),
        (1, None, (1, 8)),
        (16, None, (16, 1)),
        (3, 5, (3, 5)),
    ],
)
def test_eight_cores_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, parallel: int | None, threads: int | None, found: tuple[int, int]
) -> None:
    monkeypatch.setattr(module, "cores", lambda: 8)
    monkeypatch.setattr(module, "fastest_threads", lambda limit: limit)
    assert parallelism(parallel, threads) == Parallelism(*found)


def test_there_is_a_core() -> None:
    assert cores() >= 1
