"""Under `CI=true` no test skips: nobody would see there that a tool is missing."""

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
        reason = call.excinfo.value if call.excinfo else ""
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped, which no test may with CI=true: {reason}"
    return report
