"""What parts of models take on this CPU: measured once by a command, kept, and what predictions rest on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from command_line import run_here

from trials.cluster.part_costs import PartCosts

PLAN = (
    *("plan", "dlrm", "schema={tables: [{name: site, rows: 1000}], numeric: 13}"),
    *("training.batch_size=1024", "--json"),
)
MEASURING = "Measuring what parts of models take"


@pytest.fixture
def cached(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Where nothing is kept yet."""
    return environment | {"DHEN_SEARCH_CACHE": str(tmp_path)}


def planned(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    done = run_here((*PLAN, *words), environment, None)
    assert done.returncode == 0, done.stderr
    return done


def test_a_command_measures_this_cpu_once_and_keeps_it(cached: dict[str, str], tmp_path: Path) -> None:
    first = planned(cached)
    (kept,) = tmp_path.rglob("*.json")
    assert MEASURING in first.stderr
    assert str(kept) in first.stderr
    again = planned(cached)
    assert MEASURING not in again.stderr
    assert predicted(again) == predicted(first)
    make_slower(kept, 10.0)
    assert predicted(planned(cached)) > 5 * predicted(first)


def test_another_cluster_needs_no_measurement(cached: dict[str, str], tmp_path: Path) -> None:
    assert MEASURING not in planned(cached, "--cluster", "h100").stderr
    assert not list(tmp_path.rglob("*.json"))


def predicted(done: subprocess.CompletedProcess[str]) -> float:
    """Seconds of plain DP's step."""
    (dp,) = [each for each in json.loads(done.stdout)[0]["strategies"] if each["name"] == "dp"]
    return float(dp["step"]["total"])


def make_slower(kept: Path, factor: float) -> None:
    costs = PartCosts.model_validate_json(kept.read_text())
    kinds = {
        kind: cost.replace(
            forward=tuple(factor * each for each in cost.forward),
            backward=tuple(factor * each for each in cost.backward),
        )
        for kind, cost in costs.kinds.items()
    }
    kept.write_text(costs.replace(kinds=kinds).model_dump_json())
