"""Under `CI=true` no test skips: nobody would see there that a tool is missing.

What is kept for later commands lies in a cache of the tests' own.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
import torch
from hypothesis import settings
from tools import tool

# of a hundred examples forty find what the rest would; `make fuzz` has ten thousand
settings.register_profile("unhurried", parent=settings(), deadline=None, max_examples=40)
settings.load_profile("unhurried")  # a machine that does other work too breaks no promise


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
def _cache_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DHEN_SEARCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
