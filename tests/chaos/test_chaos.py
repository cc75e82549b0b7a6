"""Faults in small real studies, each kind once in `make test-all`; `make chaos` runs any number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from chaos.faults import FAULTS
from chaos.injection import Chaos
from tools import needs

SEED = 3


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    folder = tmp_path_factory.mktemp("chaos")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("DHEN_SEARCH_CACHE", str(folder / "cache"))
        yield Chaos(folder, SEED, dict(os.environ), stack)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[needs(fault.tool)] if fault.tool else []) for name, fault in FAULTS.items()],
)
def test_a_study_goes_on_after_a_fault(chaos: Chaos, name: str) -> None:
    (injection,) = chaos.inject(name, 0)
    assert injection.problems == ()
    assert (injection.lost, injection.doubled) == (0, 0)
    assert injection.compared == 4
