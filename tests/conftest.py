"""Under `CI=true` no test skips: nobody would see there that a tool is missing.

What parts of models take on a CPU lies in a cache of the tests' own, so that not every study measures it;
`tests/search/planning/test_measured_parts.py` has it measured.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import settings
from tools import tool

from trials.cluster.machine import Precision, cores
from trials.cluster.part_costs import PartCosts
from trials.profiling.kept import kept_at, shared_kept_at
from trials.profiling.on_ranks import SharedSetting

FILE = PartCosts.model_validate_json((Path(__file__).parent / "part_costs.json").read_text())
"""What was measured once, on an AMD EPYC; tests rest on no number of it. For hsdp stands fsdp."""
KEPT, SHARED = FILE.replace(shared=None), FILE.shared
assert SHARED is not None
settings.register_profile("unhurried", parent=settings(), deadline=None)
settings.load_profile("unhurried")  # a machine that does other work too breaks no promise
MOST_RANKS = 4
"""Hosts, and ranks per host, up to which tests let ranks of this machine share a training."""


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads sum in another order, to the bit; processes that are started have one each.

    It is of the module, so that what its tests share is made with one thread too.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test whose tools are missing, before its fixtures are made."""
    for mark in item.iter_markers("tool"):
        for name in mark.args:
            tool(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("CI") == "true":
        reason = call.excinfo.value if call.excinfo else ""
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped, which no test may with CI=true: {reason}"
    return report


@pytest.fixture(scope="session", autouse=True)
def _costs_are_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DHEN_SEARCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        keep_costs()
        yield


def keep_costs() -> None:
    """Keeps what parts of models take, and what ranks take that share a training, so that no study measures it."""
    keep_parts()
    for precision, threads in product(get_args(Precision), range(1, cores() + 1)):
        keep_shared(precision, threads)


def keep_parts() -> None:
    """Keeps what parts of models take, with any number of threads and processes, so that it is not measured."""
    counts = range(1, cores() + 1)
    for precision, threads, processes in product(get_args(Precision), counts, counts):
        path = kept_at(precision, threads, processes)
        path.parent.mkdir(parents=True, exist_ok=True)
        costs = KEPT.replace(precision=precision, threads=threads, processes=processes)
        path.write_text(costs.model_dump_json())


def keep_shared(precision: Precision, threads: int) -> None:
    """Keeps what ranks take that share a training, so that it is not measured."""
    assert SHARED is not None
    sizes = range(1, MOST_RANKS + 1)
    for hosts, ranks, counted in product(sizes, sizes, (False, True)):
        path = shared_kept_at(SharedSetting(precision, threads, hosts, ranks, counted))
        path.parent.mkdir(parents=True, exist_ok=True)
        costs = SHARED.replace(ranks=f"{hosts}x{ranks}", counted=counted)
        path.write_text(costs.model_dump_json())
