"""The code base is no larger than it may be."""

from __future__ import annotations

import pytest
from bounds import BOUNDS, size


@pytest.mark.parametrize("name", BOUNDS)
def test_nothing_is_larger_than_its_bound(name: str) -> None:
    now = size(name)
    assert now <= BOUNDS[name], f"{name}: {now:,} of {BOUNDS[name]:,}; tests/bounds.py has the rule"
