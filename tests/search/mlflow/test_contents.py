from __future__ import annotations

import csv
import io
import math
from random import Random

import pytest
import yaml
from records import changed, judged, metrics, started, study, trial, with_result

from dashboards.names import trial_name
from search.mlflow.contents import (
    FOLDED,
    METRICS,
    OPEN,
    PARAM_LENGTH,
    TAG_LENGTH,
    study_contents,
    trial_contents,
    trial_files,
)
from trials.records.study_record import StudyRecord, relative_ne_percent
from trials.records.trial_record import Attempt, Outcome, PlanSummary, StudyTrial, TrialKind, TrialRecord


def alone(outcome: Outcome = Outcome.COMPLETED, **changes) -> TrialRecord:
    return changed(trial(1, Random(0), outcome=outcome), **changes)


def test_metrics_stand_against_training_examples_seen() -> None:
    record = study()
    best = record.trial(record.best)
    series = trial_contents(best, record).series
    assert [(r.step, r.value) for r in series["ne"]] == [
        (p.examples, p.validation.ne) for p in best.result.curve
    ]
    baseline = record.trial(record.baseline)
    expected = [
        relative_ne_percent(own.validation.ne, other.validation.ne)
        for own, other in zip(best.result.curve, baseline.result.curve, strict=True)
    ]
    assert [r.value for r in series["ne_vs_baseline_percent"]] == pytest.approx(expected)
    assert {"validation/log_loss", "validation/auc", "training/loss", "training/learning_rate"} <= set(series)


def test_a_trial_stands_beside_the_baseline_of_as_many_rows() -> None:
    """On a part of the log and on all of it the same network has another NE: the two are never compared."""
    part = study()
    baseline, best = part.trial(part.baseline), part.trial(part.best)

    def promoted(trial: TrialRecord, number: int, ne: float) -> TrialRecord:
        return changed(trial, number=number, promoted_from=trial.number, validation=metrics(ne))

    on_all = (promoted(best, 1000, 0.70), promoted(baseline, 1001, 0.75))
    record = part.replace(trials=(*part.trials, *on_all), baseline=1001, best=1000)

    def relative(trial: TrialRecord, record: StudyRecord) -> float | None:
        found = trial_contents(trial, record).series.get("best_ne_vs_baseline_percent")
        return found[0].value if found else None

    assert relative(on_all[0], record) == pytest.approx(relative_ne_percent(0.70, 0.75))
    assert relative(best, record) == relative(best, part)
    waiting = part.replace(trials=(*part.trials, on_all[0]))
    assert relative(on_all[0], waiting) is None


def test_final_metrics_come_with_the_end_of_a_trial() -> None:
    record = study()
    best = trial_contents(record.trial(record.best), record).series
    finals = {"best_ne", "best_ne_vs_baseline_percent", "cost/flops", "cost/parameters", "measured/step_ms"}
    assert finals | {"test/ne", "test/auc"} <= set(best)
    running = study(finished=False)
    assert not finals & set(trial_contents(running.trials[-1], running).series)


def test_status_follows_the_outcome() -> None:
    killed = (Outcome.STOPPED, Outcome.INTERRUPTED)
    failed = (Outcome.INFEASIBLE, Outcome.OUT_OF_MEMORY, Outcome.DIVERGED, Outcome.FAILED)
    statuses = {Outcome.RUNNING: "RUNNING", Outcome.COMPLETED: "FINISHED"}
    statuses |= dict.fromkeys(killed, "KILLED") | dict.fromkeys(failed, "FAILED")
    assert statuses.keys() == set(Outcome)
    for outcome, status in statuses.items():
        contents = trial_contents(alone(outcome), judged([]))
        assert contents.status == status
        assert (contents.end_ms is None) == (outcome is Outcome.RUNNING)


def test_tags_say_what_a_trial_is() -> None:
    record = study()
    tags = trial_contents(record.trial(record.best), record).tags
    assert (tags["kind"], tags["front"], tags["best"], tags["knee"]) == ("candidate", "true", "true", "false")
    assert {"technique.planned", "technique.executed", "fingerprint", "trial.number"} <= set(tags)
    assert "reused_from" not in tags


def test_a_runs_name_says_which_trial_and_which_architecture() -> None:
    """What tells runs apart comes first: MLflow's table shows some twenty characters."""
    record = study()
    best, baseline = record.trial(record.best), record.trial(record.baseline)
    contents, model = trial_contents(best, record), trial_name(best)
    assert (contents.name, contents.tags["configuration"]) == (f"#{best.number} {model}",) * 2
    name = trial_contents(baseline, record).name
    assert name == f"#{baseline.number} {trial_name(baseline)} baseline"
    again = trial_contents(retrained(best, 0, seed=3), record)
    assert again.name == f"#{best.number} seed 3 {model}"
    assert again.tags["configuration"] == contents.tags["configuration"]
    without = retrained(best, 0, seed=3, removed="layer 1")
    assert trial_contents(without, record).name == f"#{best.number} without layer 1 seed 3 {model}"
    long = {"family": "f" * 999}
    names = [trial_contents(trial.with_job(model=long), record).name for trial in record.trials]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) == 250
    assert names[baseline.number].endswith(" baseline")


def test_a_trial_has_mean_and_spread_over_its_seeds() -> None:
    record = study()
    best = record.trial(record.best)
    seeds = tuple(retrained(best, number, seed=number + 1, ne=0.7 + number / 100) for number in range(3))
    others = (
        retrained(best, 3, seed=1, ne=0.9, removed="layer 1"),
        retrained(record.trial(record.baseline), 4, seed=1, ne=0.9),
        retrained(best, 5, seed=4, ne=0.9).with_result(outcome=Outcome.RUNNING, validation=None, test=None),
    )
    record = record.replace(retrainings=seeds + others)
    series = trial_contents(best, record).series
    numbers = {key: readings[-1].value for key, readings in series.items() if key.startswith("seeds/")}
    assert numbers == pytest.approx(
        {
            "seeds/count": 3,
            "seeds/best_ne.mean": 0.71,
            "seeds/best_ne.std": 0.01,
            "seeds/test_ne.mean": 0.72,
            "seeds/test_ne.std": 0.01,
        }
    )
    assert not any(key.startswith("seeds/") for key in trial_contents(seeds[0], record).series)


def test_the_page_of_charts_begins_with_few() -> None:
    """Metrics without a prefix are MLflow's first section; every other has a section of its own in the views."""
    record = study()
    seeds = tuple(retrained(record.trial(record.best), number, seed=number + 1) for number in range(2))
    runs = [trial_contents(trial, record.replace(retrainings=seeds)) for trial in record.trials]
    keys = {key for contents in (*runs, study_contents(record)) for key in contents.series}
    alone = {key for key in keys if "/" not in key}
    assert alone == {"ne", "ne_vs_baseline_percent", "best_ne", "best_ne_vs_baseline_percent"}
    assert {key.partition("/")[0] for key in keys - alone} <= {*OPEN, *FOLDED}
    assert set(METRICS) <= keys


def retrained(
    trial: TrialRecord, number: int, *, seed: int, ne: float = 0.7, removed: str | None = None
) -> TrialRecord:
    """A trial's network trained again from another seed, some minutes after the one before."""
    again = trial.replace(kind=TrialKind.RETRAINING, number=number)
    again = again.with_origin(of=trial.number, removed=removed, started_at=started(1000 + 10 * number))
    return again.with_job(seed=seed).with_result(validation=metrics(ne), test=metrics(ne + 0.01))


def test_every_attempt_is_there() -> None:
    short = Attempt(strategy="dp", outcome=Outcome.OUT_OF_MEMORY, predicted_bytes=5, error="out of memory")
    done = Attempt(
        strategy="zero1",
        outcome=Outcome.COMPLETED,
        predicted_bytes=4,
        measured_bytes=3,
        measured_step_seconds=0.5,
        replaced="rank 1 was killed",
        slow_rank="rank 0 is slow",
    )
    contents = trial_contents(alone(attempts=(short, done)), judged([]))
    assert contents.tags["attempts"] == "2"
    told = {key: value for key, value in contents.tags.items() if key.startswith("attempt.")}
    assert told == {
        "attempt.0.strategy": "dp",
        "attempt.0.outcome": "out_of_memory",
        "attempt.0.error": "out of memory",
        "attempt.1.strategy": "zero1",
        "attempt.1.outcome": "completed",
        "attempt.1.replaced": "rank 1 was killed",
        "attempt.1.slow_rank": "rank 0 is slow",
    }
    numbers = {key: rest[0].value for key, rest in contents.series.items() if key.startswith("attempts/")}
    assert numbers == {
        "attempts/0.predicted_bytes": 5,
        "attempts/1.predicted_bytes": 4,
        "attempts/1.measured_bytes": 3,
        "attempts/1.measured_step_seconds": 0.5,
    }


def test_what_was_forced_is_what_was_asked_of_the_first_plan_and_what_was_taken_over_is_said() -> None:
    """An attempt after one that ran out of memory is planned without the margin."""
    second = PlanSummary(strategy="fsdp", fits=True, examples_per_rank=8, restricted_to="fsdp")
    first = second.replace(memory_margin=-(2**20))
    attempts = (
        Attempt(strategy="fsdp", plan=first, outcome=Outcome.OUT_OF_MEMORY, predicted_bytes=5),
        Attempt(strategy="fsdp", plan=second, outcome=Outcome.COMPLETED, predicted_bytes=4),
    )
    tags = trial_contents(alone(attempts=attempts, summary=second), judged([])).tags
    assert (tags["technique.forced"], tags["memory_margin"]) == ("fsdp", "-1048576")
    taken = alone(reused_from_study=StudyTrial(study="a-1", directory="/runs/a", trial=7))
    tags = trial_contents(taken, judged([])).tags
    assert (tags["reused_from_study"], tags["attempts"]) == ("/runs/a trial 7", "0")


def test_long_and_odd_values_are_made_to_fit() -> None:
    odd = alone(point={"axis (new)": "x" * 9000, "none": None}, error="y" * 9000, model={"a": {"b": [1, 2]}})
    contents = trial_contents(odd, judged([]))
    assert contents.params["axis _new_"].endswith("…")
    assert len(contents.params["axis _new_"]) == PARAM_LENGTH
    assert len(contents.tags["error"]) == TAG_LENGTH
    assert contents.params["model.a.b"] == "[1, 2]"
    assert "none" not in contents.params


def test_values_that_are_no_numbers_are_left_out() -> None:
    diverged = alone(Outcome.DIVERGED, validation=metrics(math.nan), flops=math.inf)
    series = trial_contents(diverged, judged([])).series
    assert "best_ne" not in series
    assert "cost/flops" not in series
    assert all(math.isfinite(reading.value) for readings in series.values() for reading in readings)


def test_files_hold_configuration_and_cost_whole() -> None:
    own = alone()
    files = dict(trial_files(own, judged([])))
    assert yaml.safe_load(files["config.yaml"]) == {"model": own.job.model, "training": own.job.training}
    rows = list(csv.DictReader(io.StringIO(files["cost.csv"])))
    assert [(row["name"], float(row["flops"])) for row in rows] == [
        (row.name, row.flops) for row in own.job.cost
    ]


def test_the_study_has_its_best_after_each_candidate() -> None:
    record = study()
    contents = study_contents(record)
    values = [reading.value for reading in contents.series["study/best_ne"]]
    assert values == sorted(values, reverse=True)
    assert values[-1] == record.trial(record.best).result.validation.ne
    assert contents.series["study/best_ne"][-1].step == len(record.candidates)
    assert contents.params["log.rows.train"] == "400000"
    assert contents.tags["front"] == ", ".join(map(str, record.front))


def test_a_trial_that_goes_on_later_is_no_reading_of_the_best_so_far() -> None:
    record = study(6)
    last = record.candidates[-1].number
    ended = study_contents(record).series["study/best_ne"]
    cut = with_result(record, last, outcome=Outcome.INTERRUPTED, validation=None, seconds=None)
    assert study_contents(cut).series["study/best_ne"] == ended[:-1]
