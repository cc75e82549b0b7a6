"""Faults in small real studies, each kind once in `make test-all`; `make chaos` runs any number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from chaos.faults import FAULTS
from chaos.injection import Chaos, Injection
from chaos.table import INJECTIONS, PAGE, append, injections, table, with_table
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


def test_the_page_has_the_committed_table() -> None:
    page = PAGE.read_text()
    assert page == with_table(page, injections())
    assert {injection.fault for injection in injections(INJECTIONS)} <= FAULTS.keys()


def test_the_table_counts(tmp_path: Path) -> None:
    path, one = tmp_path / "lines.jsonl", Injection(fault="rank_killed", seed=1, number=0)
    for injection in (
        one.replace(compared=4, recovered_seconds=2.0),
        one.replace(compared=3, recovered_seconds=4.0, lost=1, problems=("trial 2: failed",)),
        one.replace(fault="driver_killed", problems=("process 1 is left",)),
    ):
        append(injection, path)
    lines = {line.split(" | ")[0]: line for line in table(injections(path)).splitlines()}
    assert lines["| SIGKILL of a rank"] == "| SIGKILL of a rank | 2 | 1 | 0 | 7 | 0 | 3.0 | 4.0 |"
    assert lines["| SIGKILL of the driver"] == "| SIGKILL of the driver | 1 | 0 | 0 | 0 | 1 |  |  |"
    assert lines["| all"] == "| all | 3 | 1 | 0 | 7 | 1 | 3.0 | 4.0 |"
