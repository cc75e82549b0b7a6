"""What parts of models take on this CPU: measured once by a command, kept, and what predictions rest on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import COMMAND, TIMEOUT_SECONDS, run_here
from conftest import keep_parts

from search.read_study import read_study
from trials.cluster.machine import cores
from trials.cluster.part_costs import PartCosts
from trials.cluster.shared_costs import SharedCosts

SHORT = ("space=tiny", "baseline_trials=1", "training.epochs=1", "averages=0", "confirm=0")
PLAN = (
    *("plan", "dlrm", "schema={tables: [{name: site, rows: 1000}], numeric: 13}"),
    *("training.batch_size=1024", "--json"),
)
MEASURING = "Measuring what parts of models take"
MEASURING_RANKS = "Measuring what 2 ranks of one training"


@pytest.fixture
def cached(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Where nothing is kept yet."""
    return environment | {"DHEN_SEARCH_CACHE": str(tmp_path)}


@pytest.fixture
def _one_core() -> Iterator[None]:
    """One thread measures, so that other work does not make two of them wait for each other."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def planned(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    done = run_here((*PLAN, *words), environment, None)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.usefixtures("_one_core")
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


@pytest.fixture
def parts_kept(cached: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Where parts are kept, and what ranks take that share a training is not."""
    with monkeypatch.context() as patch:
        patch.setenv("DHEN_SEARCH_CACHE", cached["DHEN_SEARCH_CACHE"])
        keep_parts()
    return cached


@pytest.mark.slow
def test_ranks_that_share_a_training_are_measured_where_a_plan_asks_for_them(
    parts_kept: dict[str, str], tmp_path: Path
) -> None:
    assert MEASURING_RANKS not in planned(parts_kept).stderr
    first = planned(parts_kept, "ranks=1x2")
    assert f"{MEASURING_RANKS} take" in first.stderr
    (kept,) = (tmp_path / "shared-costs").iterdir()
    assert str(kept) in first.stderr
    again = planned(parts_kept, "ranks=1x2")
    assert MEASURING_RANKS not in again.stderr
    assert predicted(again) == predicted(first)
    costs = SharedCosts.model_validate_json(kept.read_text())
    kept.write_text(costs.in_turns(100.0).model_dump_json())
    assert predicted(planned(parts_kept, "ranks=1x2")) > 5 * predicted(first)


def test_more_than_two_ranks_for_each_core_are_not_measured(parts_kept: dict[str, str]) -> None:
    assert "Measuring" not in planned(parts_kept, f"ranks=1x{2 * cores() + 1}").stderr


@pytest.mark.parametrize("ranks", [None, "1x2"], ids=["parts", "ranks"])
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(0.2, marks=pytest.mark.slow, id="as it begins"),
        pytest.param(2.0, id="as it imports or measures"),
    ],
)
@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_breaking_off_a_measurement_leaves_no_process_and_no_traceback(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    ranks: str | None,
    seconds: float,
    number: signal.Signals,
    to_all: bool,
) -> None:
    """Ctrl-C reaches all processes of a terminal's command, a cluster's SIGTERM the command alone."""
    environment = request.getfixturevalue("cached" if ranks is None else "parts_kept")
    before = sorted(tmp_path.rglob("*.json"))
    words = [COMMAND, *PLAN, *([] if ranks is None else [f"ranks={ranks}"])]
    begun = subprocess.Popen(
        words, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert begun.stderr is not None
    assert (MEASURING if ranks is None else MEASURING_RANKS) in begun.stderr.readline()
    time.sleep(seconds)
    of_it = processes_of(begun.pid)
    assert begun.pid in of_it
    (os.killpg if to_all else os.kill)(begun.pid, number)
    said = begun.communicate(timeout=TIMEOUT_SECONDS)[1]
    assert begun.returncode == 130
    assert "Traceback" not in said
    deadline = time.monotonic() + 60  # what counts shared memory ends by itself, a moment later
    while processes_of(begun.pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert sorted(tmp_path.rglob("*.json")) == before


def processes_of(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def test_a_study_of_few_minutes_measures_nothing_and_has_candidates(
    cached: dict[str, str], click_log: Path, tmp_path: Path
) -> None:
    words = ("run", "--data", click_log, "--out", tmp_path / "study", "minutes=4", "trials=1", *SHORT)
    done = run_here(words, cached, None)
    assert done.returncode == 0, done.stderr
    assert f"Not {MEASURING.lower()}" in done.stderr
    (seconds,) = re.findall(r"the minutes leave (\d+) s for it", done.stderr)
    assert int(seconds) <= 24  # a tenth
    spent = r"Of its .* the study has spent .* on the baseline, .* on candidates"
    assert re.search(spent, " ".join(done.stdout.split()))
    assert read_study(tmp_path / "study").candidates
