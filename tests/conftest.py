"""Under `CI=true` no test skips: a tool that is missing there is a mistake of the machine, and nobody would see it."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} skipped, which no test may with CI=true: {call.excinfo and call.excinfo.value}"
        )
    return report
