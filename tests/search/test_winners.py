"""Winners after a study: retrained, compared on test, ablated, sliced; by the command line."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from command_line import COMMAND, SMALL, TIMEOUT_SECONDS, Run

from dhen.config import DhenConfig
from dhen.errors import UserError
from search.bundle import read_bundle
from search.directory import read_record
from search.winners.ablate import without_parts
from trials.record import Better, Comparison, Outcome

BOTH = 2
"""Seeds."""


@pytest.fixture(scope="module")
def confirmed(dhen_search: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study on the demo log whose winners were compared at its end."""
    out = tmp_path_factory.mktemp("winners") / "study"
    dhen_search("run", "--out", out, "trials=3", "demo.rows=3000", f"confirm={BOTH}", *SMALL)
    return out


def looks(directory: Path) -> int:
    with sqlite3.connect(directory / "study.db") as connection:
        return int(connection.execute("select count(*) from dhen_test_look").fetchone()[0])


def test_winners_carry_a_verdict(confirmed: Path) -> None:
    record = read_record(confirmed)
    assert [each.trial for each in record.comparisons] == list(record.front)
    trained = {(each.of, each.seed) for each in record.retrainings}
    assert trained == {(n, seed) for n in (record.baseline, *record.front) for seed in (1, 2)}
    assert looks(confirmed) == (1 + BOTH) * (1 + len(record.front))
    best = record.comparison(record.best)
    assert best is not None
    assert read_bundle(confirmed / "best").info.comparison == best
    assert {trial.number for trial in record.trials} == {0, 1, 2, 3}


def test_the_difference_is_that_of_the_metrics(confirmed: Path) -> None:
    """Block sums of kept logits say of each pair what the metrics of their scoring say."""
    record = read_record(confirmed)
    ne = {(each.of, each.seed): each.test.ne for each in record.retrainings if each.test}
    for each in record.comparisons:
        percents = [100.0 * (ne[each.trial, s] / ne[record.baseline or 0, s] - 1.0) for s in each.seeds]
        assert each.difference_percent == pytest.approx(float(np.mean(percents)), abs=1e-6)
        assert each.low_percent <= each.difference_percent <= each.high_percent


def test_report_and_mlflow_show_it(confirmed: Path) -> None:
    record = read_record(confirmed)
    page = (confirmed / "report.html").read_text()
    assert 'id="winners"' in page
    assert "Retrained from 2 seeds, the best candidate" in page
    with sqlite3.connect(confirmed / "mlflow.db") as store:
        kinds = [v for (v,) in store.execute("select value from tags where key = 'kind'")]
        verdicts = [v for (v,) in store.execute("select value from tags where key = 'baseline.better'")]
    assert kinds.count("retraining") == len(record.retrainings)
    assert verdicts == [each.better.value for each in record.comparisons]


def test_more_seeds_add_to_those_there_are(dhen_search: Run, confirmed: Path) -> None:
    before = {each.number: each.started_at for each in read_record(confirmed).retrainings}
    said = json.loads(dhen_search("confirm", confirmed, "--seeds", 3, "--block-by", "C1", "--json").stdout)
    record = read_record(confirmed)
    assert [Comparison.model_validate(each) for each in said] == list(record.comparisons)
    assert all(each.seeds == (1, 2, 3) and each.blocked_by == "C1" for each in record.comparisons)
    now = {each.number: each.started_at for each in record.retrainings}
    assert len(now) == len(before) + 1 + len(record.front)
    assert before.items() <= now.items()
    again = dhen_search("confirm", confirmed, "--seeds", 3)
    assert "retrained trial" not in again.stdout
    assert any(f" {better.value} " in again.stdout for better in Better)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill"])
def test_goes_on_from_where_it_was(
    dhen_search: Run, study: Path, environment: dict[str, str], how: signal.Signals
) -> None:
    seeds = "2" if how is signal.SIGINT else "3"
    known = len(read_record(study).retrainings)
    process = subprocess.Popen(
        [str(COMMAND), "confirm", str(study), "--seeds", seeds],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    begun = study / "retrained" / "trials" / f"{known + 1:05d}" / "events.jsonl"
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not begun.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if how is signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.kill()
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    kept = [each for each in read_record(study).retrainings if each.test is not None]
    assert len(kept) >= known + 1
    dhen_search("confirm", study, "--seeds", seeds)
    record = read_record(study)
    assert all(each.outcome is Outcome.COMPLETED for each in record.retrainings)
    assert len(record.retrainings) == int(seeds) * (1 + len(record.front))
    now = {each.number: each.started_at for each in record.retrainings}
    assert {each.number: each.started_at for each in kept}.items() <= now.items()


def test_ablation(dhen_search: Run, confirmed: Path) -> None:
    looked = looks(confirmed)
    said = json.loads(dhen_search("ablate", confirmed, "--seeds", BOTH, "--json").stdout)
    trial = read_record(confirmed).trial(said["trial"])
    assert {part["removed"] for part in said["parts"]} == set(
        without_parts(DhenConfig.model_validate(trial.model))
    )
    for part in said["parts"]:
        assert part["ne_percent"]["low"] <= part["ne_percent"]["mean"] <= part["ne_percent"]["high"]
        assert part["flops_percent"] == pytest.approx(100 * (1 - part["flops"] / said["flops"]))
    assert looks(confirmed) == looked
    table = dhen_search("ablate", confirmed, "--seeds", BOTH).stdout
    assert "retrained trial" not in table
    assert all(part["removed"] in table for part in said["parts"])


def test_without_parts() -> None:
    layer = {"modules": ["attention", "linear"], "ensemble": "concat"}
    parts = without_parts(DhenConfig.model_validate({"layers": [layer, {"modules": ["cross"]}]}))
    assert set(parts) == {"layer0: attention", "layer0: linear", "layer0", "layer1"}
    assert [len(each.layers) for each in parts.values()] == [2, 2, 1, 1]
    assert parts["layer0: linear"].layers[0].ensemble.kind == "sum"
    with pytest.raises(UserError, match="nothing to remove"):
        without_parts(DhenConfig.model_validate({"layers": [{"modules": ["cross"]}]}))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seeds", "1"), "two seeds at least"),
        (("--block-by", "nothing"), "expected a categorical column of the log: C1"),
    ],
)
def test_bad_input_of_confirm(dhen_search: Run, confirmed: Path, words: tuple[str, ...], said: str) -> None:
    error = dhen_search("confirm", confirmed, *words, code=2).stderr.replace("2 seeds", "two seeds")
    assert said in error


def test_a_study_that_is_not_finished_is_not_compared(
    dhen_search: Run, confirmed: Path, tmp_path: Path
) -> None:
    assert "no study here" in dhen_search("confirm", tmp_path, code=2).stderr
    error = dhen_search("run", "--out", tmp_path / "one", "confirm=1", *SMALL, code=2).stderr
    assert "an interval needs two seeds" in error
    with sqlite3.connect(confirmed / "study.db") as connection:
        (facts,) = connection.execute("select facts from dhen_study").fetchone()
        undone = json.loads(facts)
        undone["record"]["finished"] = False
        connection.execute("update dhen_study set facts = ?", (json.dumps(undone),))
    try:
        assert "the study is not finished" in dhen_search("confirm", confirmed, code=2).stderr
    finally:
        with sqlite3.connect(confirmed / "study.db") as connection:
            connection.execute("update dhen_study set facts = ?", (facts,))
