"""Benchmarks of whole studies and of samplers, on small cases."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from command_line import SMALL, run_here
from running_benchmarks import FOLDER, number, run_benchmark, run_benchmark_process, tables

from benchmarks.search.same_study import differences

CANDIDATES = FOLDER / "search" / "demo_candidates.json"


@pytest.mark.slow
def test_the_table_of_a_study_holds_its_candidates(study: Path, tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    said = run_benchmark("benchmarks.search.candidate_table", study, "--out", out)
    candidates = json.loads(out.read_text())["candidates"]
    assert len(candidates) == 3
    assert all(0.3 < each["ne"] < 2 and each["curve"] for each in candidates)
    assert "'completed': 3" in said


@pytest.mark.slow
def test_studies_are_compared_by_their_samplers(study: Path) -> None:
    (rows,) = tables(run_benchmark("benchmarks.search.samplers_live", study, "--marks", 2, 3))
    (row,) = rows
    assert number(row["area x 1e3, 3"]) >= number(row["area x 1e3, 2"]) >= 0
    assert number(row["best NE, 3"]) <= number(row["best NE, 2"])


@pytest.mark.slow
def test_a_command_is_held_against_its_minutes(log: Path) -> None:
    """A moment is not enough for candidates; the columns are there all the same."""
    words = (log, *SMALL, "training.epochs=1", "--minutes", 0.01)
    (rows,) = tables(run_benchmark("benchmarks.search.minutes_kept", *words))
    (row,) = rows
    assert number(row["asked, s"]) == 1
    assert number(row["taken, s"]) >= 1
    assert (row["candidates"], row["seeds"], row["best NE"]) == ("0", "0", "-")


@pytest.mark.slow
def test_a_wide_log_is_generated_and_searched(tmp_path: Path) -> None:
    words = ("--rows", 600, "--categorical", 8, "--numeric", 30, "--minutes", 0.01)
    run = run_benchmark("benchmarks.search.wide_log", tmp_path, "training.epochs=1", *words)
    (rows,) = tables(run)
    (row,) = rows
    assert number(row["minutes"]) == pytest.approx(0.01)
    assert number(row["largest rank, GiB"]) > 0.0
    assert (tmp_path / "wide-600-8-30-0.csv").read_text().startswith('"label","c0","c1"')


@pytest.mark.slow
def test_networks_that_have_learnt_from_validation_stand_beside_those_that_have_not(
    study: Path, tmp_path: Path
) -> None:
    copied = tmp_path / study.name
    shutil.copytree(study, copied)
    (rows,) = tables(run_benchmark("benchmarks.training.refit_gain", copied, "--seeds", 2))
    assert rows[0]["network"].startswith("baseline, ")
    for row in rows:
        percent = 100.0 * (number(row["with validation"]) / number(row["NE on test"]) - 1.0)
        assert number(row["difference, 95 % interval"].split()[0]) == pytest.approx(percent, abs=0.02)


@pytest.mark.slow
def test_rates_that_fall_stand_beside_constant_ones(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "study"
    words = ("space=tiny", "trials=1", "baseline_trials=1", "threads=1", "parallel=1")
    assert run_here(("run", "--data", log, "--out", out, *words), {}, None).returncode == 0
    said = run_benchmark(
        "benchmarks.training.falling_rates", out, "--passes", 2, 3, "--networks", 2, "--seeds", 2
    )
    (rows,) = tables(said)
    assert [row["network"] for row in rows][0::2] == ["advanced_dlrm 256-128 d16", "all"]
    for row in rows:
        for column in ("falling over 2, times the seconds", "falling over 3, times the seconds"):
            percent, error, _, times = row[column].replace("± ", "").replace(",", "").split()
            assert -50 < number(percent) < 50
            assert number(error) > 0
            assert 0 < number(times) < 10


@pytest.mark.slow
def test_samplers_are_compared_on_a_made_up_function(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    words = ("--synthetic", "--samplers", "random", "tpe", "--trials", 12, "--repeats", 2, "--out", out)
    said = run_benchmark("benchmarks.search.samplers_on_surrogate", *words)
    area = tables(said)[0]
    assert [row["sampler"] for row in area] == ["random", "tpe"]
    assert all(number(row["12 trials"]) > 0 for row in area)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(line["sampler"], line["repeat"]) for line in lines} == {
        (name, repeat) for name in ("random", "tpe") for repeat in range(2)
    }
    again = run_benchmark("benchmarks.search.samplers_on_surrogate", *words)  # nothing is left to do
    assert tables(again) == tables(said)
    assert out.read_text().count("\n") == 4


@pytest.mark.slow
def test_samplers_are_compared_on_trained_candidates_with_stopping(tmp_path: Path) -> None:
    table = json.loads(CANDIDATES.read_text())
    few = tmp_path / "table.json"
    few.write_text(json.dumps(table | {"candidates": table["candidates"][:80]}))
    words = (few, "--samplers", "random", "random+curve", "--trials", 12, "--repeats", 2)
    said = run_benchmark_process("benchmarks.search.samplers_on_surrogate", *words)
    assert "surrogate, cross-validated" in said
    assert [row["sampler"] for row in tables(said)[0]] == ["random", "random+curve"]


@pytest.mark.slow
def test_stopping_rules_are_replayed() -> None:
    words = (CANDIDATES, "--orders", 1, "--candidates", 20)
    (rows,) = tables(run_benchmark("benchmarks.search.stopping_replayed", *words))
    by_name = {row["stopping"]: row for row in rows}
    assert number(by_name["none"]["examples"]) == 100
    assert number(by_name["none"]["hypervolume lost"]) == 0
    assert all(0 < number(row["examples"]) <= 100 for row in rows)


@pytest.mark.slow
def test_candidates_per_hour_are_counted(log: Path) -> None:
    words = (log, "trials=2", "space=tiny", "training.epochs=1", "baseline_trials=1")
    said = run_benchmark(
        "benchmarks.search.candidates_per_hour", *words, "--settings", "parallel=1 threads=1"
    )
    (rows,) = tables(said)
    (row,) = rows
    assert row["candidates"] == "2"
    assert number(row["candidates an hour"]) > 0


@pytest.mark.slow
def test_what_a_candidate_costs_beside_training_is_itemised() -> None:
    words = ("--marks", 2, "--rows", 1000)
    said = run_benchmark_process("benchmarks.search.overhead_per_candidate", *words)
    (rows,) = tables(said)
    (row,) = rows
    assert row["candidates"] == "2"
    assert all(number(row[name]) >= 0 for name in ("training", "ask", "plan", "ledger", "start", "tell"))
    assert "`status` " in said


@pytest.mark.slow
def test_a_study_that_has_many_candidates_is_measured_too() -> None:
    words = ("--known", 5, "--marks", 2, "--rows", 1000)
    (rows,) = tables(run_benchmark_process("benchmarks.search.overhead_per_candidate", *words))
    assert rows[0]["candidates"] == "7"


@pytest.mark.slow
def test_status_of_a_study_with_many_candidates_is_timed() -> None:
    words = ("--known", 5, "--status", "--repeats", 1, "--rows", 1000)
    (rows,) = tables(run_benchmark_process("benchmarks.search.overhead_per_candidate", *words))
    assert [row["command"] for row in rows] == ["--help", "status", "status --json", "report"]
    assert all(number(row["seconds, least"]) > 0 for row in rows)


@pytest.mark.slow
def test_the_best_of_a_study_stands_beside_usual_models(log: Path, tmp_path: Path) -> None:
    words = (log, *SMALL, "--out", tmp_path / "study", "--trials", 2, "--seeds", 2)
    (rows,) = tables(run_benchmark("benchmarks.search.best_beside_usual_models", *words))
    names = [row["model"] for row in rows]
    assert names[0].startswith("best of 2 candidates")
    assert names[1:4] == ["histogram gradient boosting", "logistic regression", "AdvancedDLRM, tuned"]
    assert any(name.startswith("2x[") for name in names)
    assert all(0.3 < number(row["test NE"]) < 2 for row in rows)
    assert all("to" in row["the best less this, 95 % interval"] for row in rows[1:])


@pytest.mark.slow
def test_a_study_stands_beside_tuned_gradient_boosting(log: Path, tmp_path: Path) -> None:
    words = (log, *SMALL, "trials=1", "--minutes", 0.5, "--seeds", 2, "--libraries", "sklearn")
    (rows,) = tables(run_benchmark("benchmarks.search.beside_boosting", *words, "--out", tmp_path / "study"))
    *winners, boosting = rows
    assert winners
    assert re.fullmatch(r"sklearn, \d+ settings tried", boosting["model"])
    assert all(0.3 < number(row["test NE"]) < 2 for row in rows)
    assert "to" in boosting["the best less this, 95 % interval"]


@pytest.mark.slow
def test_one_command_stands_beside_an_earlier_version_and_boosting(tmp_path: Path) -> None:
    words = ("trees", "--rows", 2000, "--minutes", 0.5, "--libraries", "sklearn", "--previous", FOLDER.parent)
    (rows,) = tables(
        run_benchmark_process("benchmarks.search.one_command", *words, "--out", tmp_path / "trees")
    )
    ours, lowest, earlier, boosting = rows
    assert lowest["model"].startswith("its lowest NE: ")
    assert re.match(r"this version, \d+ candidates: ", ours["model"])
    assert re.fullmatch(r"sklearn, \d+ settings tried", boosting["model"])
    assert all(0.3 < number(row["test NE"]) < 2 for row in rows)
    for row in (lowest, earlier, boosting):
        beside = row["this version less it, 95 % interval over rows"]
        percent, low, high = map(float, re.findall(r"[-+]\d+\.\d+", beside))
        assert low <= percent <= high


@pytest.mark.slow
def test_the_walk_of_a_candidate_is_followed() -> None:
    said = run_benchmark_process("benchmarks.search.candidate_walk")
    assert "The walk: files that make the candidate, change it or keep it: " in said
    for name in ("trials/store/ledger.py", "search/mlflow/fill_in.py", "search/samplers/ask_tell.py"):
        assert f" {name} " in said


@pytest.mark.slow
def test_the_passes_found_stand_beside_fixed_numbers() -> None:
    words = ("demo", "demo.rows=1000", "--most", 2, "--networks", "dlrm")
    (rows,) = tables(run_benchmark("benchmarks.search.passes_found", *words))
    (row,) = rows
    assert row["network"] == "dlrm"
    # embeddings decay where passes are found, and do not where their number is fixed
    assert all(0.3 < number(row[column]) < 2 for column in ("auto", "1", "2"))


@pytest.mark.slow
def test_growing_spaces_stand_beside_those_that_stay(tmp_path: Path) -> None:
    words = ("low-rank", "trials=2", "baseline_trials=1", "training.epochs=1", "parallel=1", "threads=1")
    said = run_benchmark(
        "benchmarks.search.growing_space", *words, "--seeds", 0, "--out", tmp_path / "studies"
    )
    (rows,) = tables(said)
    assert [row["seed"] for row in rows] == ["0", "mean"]
    for column in ("best NE to the baseline: grow=yes", "grow=no"):
        assert -50 < number(rows[0][column].removesuffix(" %")) < 50
    assert rows[0]["widened"] == "none"
    assert number(rows[0]["candidates' seconds"]) > 0


@pytest.mark.slow
def test_picks_on_drifting_logs_stand_beside_the_baseline(tmp_path: Path) -> None:
    small = (
        "demo.rows=2000",
        "trials=2",
        "space=tiny",
        "averages=2",
        "baseline_trials=1",
        "training.epochs=1",
    )
    words = ("--out", tmp_path, "--seeds", 1, "--origins", 1, *small)
    studies, picked = tables(run_benchmark("benchmarks.search.picks_under_drift", *words))
    (row,) = studies
    assert number(row["optimism"]) >= 0
    assert [each["picked"] for each in picked] == [
        "the lowest on validation",
        "the best by validation",
        "the best by validation and 1 periods before it",
    ]
    for each, column in zip(picked, ("lowest, test", "best, test", "best of periods, test"), strict=True):
        assert each["mean"] == each["worst"] == row[column]
        assert sum(number(each[name]) for name in ("better", "the baseline itself", "worse")) == 1


def test_fields_of_two_checkouts_are_compared_by_their_new_names() -> None:
    old = {"log": {"status": {"trials": [{"ne": 0.8, "old": {"a": 1}}, {"ne": 0.9}], "created_at": "1"}}}
    new = {"log": {"status": {"trials": [{"ne": 0.8, "new": {"a": 1}}, {"ne": 0.9000000000000001}]}}}
    off = "log: status.trials.ne [1]: 0.9 -> 0.9000000000000001"
    assert [*differences(old, new, {"status.trials.old": "status.trials.new"})] == [off]
    assert [*differences(old, new, {})] == [
        "log: status.trials.old.a [0]: 1 -> missing",
        off,
        "log: status.trials.new.a [0]: missing -> 1",
    ]


@pytest.mark.slow
def test_a_checkout_finds_the_same_as_itself(tmp_path: Path) -> None:
    words = (FOLDER.parent, FOLDER.parent, "--logs", "stamped", "--trials", 1, "--rows", 600, "--keep")
    assert "no difference" in run_benchmark("benchmarks.search.same_study", *words, tmp_path / "kept")
    results = json.loads((tmp_path / "kept" / "new" / "results.json").read_text())
    assert len(results["configuration"]["plan"]) == 5
    assert len(results["stamped"]["scores of lowest"]) == 200
