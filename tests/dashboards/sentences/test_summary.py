from __future__ import annotations

from random import Random

from records import bare, judged, metrics, started, study, trial
from reports.planned import confirmed

from dashboards.sentences.stages import where_minutes_went
from dashboards.sentences.summary import sentences
from dashboards.sentences.winners import explanation
from trials.records.study_record import ExpectedGain, RefitResult
from trials.records.trial_record import Outcome, TrialKind


def test_the_best_comes_first_in_percent_and_flops() -> None:
    record = study()
    best, baseline = record.trial(record.best), record.trial(record.baseline)
    first = sentences(record)[0]
    percent = (
        100 * (baseline.result.validation.ne - best.result.validation.ne) / baseline.result.validation.ne
    )
    assert f"trial {best.number} " in first
    assert f"{percent:.2f} % below the tuned baseline" in first
    assert f"at {best.job.flops / baseline.job.flops:.3g}x its FLOPs" in first


def test_floor_and_test_are_told_and_how_to_go_on_after_what_ended_the_search() -> None:
    text = " ".join(sentences(study()))
    assert "No model can go below NE 0.77310 on validation" in text
    assert "of the gap closed" in text
    assert "On the test split" in text
    assert text.count("each trained once; whether it is better: dhen-search confirm runs/ads-march.") == 1
    assert "below NE 0.77410 on test" in text
    gain = ExpectedGain(percent=0.05, candidates=30, more=3, detectable_percent=0.4)
    assert "with search_until=none goes on" in " ".join(sentences(study(expected_gain=gain)))
    worth = gain.replace(worth_percent=0.5)  # beside which search_until=none is refused
    assert "without worth= and with search_until=none" in " ".join(sentences(study(expected_gain=worth)))


def test_a_candidate_worse_than_the_baseline_is_not_praised() -> None:
    random = Random(0)
    baseline = trial(0, random, kind=TrialKind.BASELINE)
    worse = baseline.result.validation.replace(ne=baseline.result.validation.ne * 1.01)
    candidate = trial(1, random).with_result(validation=worse)
    text = " ".join(sentences(judged([baseline, candidate])))
    assert "1.00 % above the tuned baseline" in text
    assert "gap closed" not in text


def test_a_knee_is_told_where_the_baseline_is_not_better_for_fewer_flops() -> None:
    baseline, best = (trial(number, Random(number)) for number in range(2))
    baseline = baseline.replace(kind=TrialKind.BASELINE)
    cheap, ne = 0.5 * (baseline.job.flops or 0.0), baseline.result.validation.ne

    def said(ne: float, flops: float) -> str:
        knee = trial(2, Random(2)).with_result(validation=baseline.result.validation.replace(ne=ne))
        knee = knee.replace(job=knee.job.replace(flops=flops))
        return " ".join(sentences(judged([baseline, best, knee], best=1, knee=2, front=(1, 2))))

    assert "above the baseline, at 0.5x its FLOPs" in said(1.01 * ne, cheap)
    assert "The knee of the front" in said(0.99 * ne, 4 * cheap)
    assert "knee" not in said(1.01 * ne, 4 * cheap)


def test_studies_without_a_result_say_why() -> None:
    assert sentences(judged([])) == ("No candidate has ended yet.",)
    failed = sentences(judged([trial(0, Random(0), outcome=Outcome.FAILED)]))
    assert failed[0] == "No candidate has a result."
    assert "1 failed" in failed[1]
    assert "exit code 1" in failed[2]
    assert "no baseline yet" in sentences(judged([trial(0, Random(0))]))[0]
    baseline = trial(0, Random(0), kind=TrialKind.BASELINE).with_result(seconds=40.0)
    too_few = judged([baseline], seconds_budget=120.0, finished=True, best=None, front=())
    assert "training of the baseline takes 40 s; the same command with minutes=8" in sentences(too_few)[0]


def test_seeds_that_diverged_are_told() -> None:
    record = confirmed(study(seconds_budget=60.0))
    others = " ".join(sentences(record))
    assert "adds others, up to 5" in others
    lost = bare(0, ne=0.9, flops=1.0, kind=TrialKind.RETRAINING, outcome=Outcome.DIVERGED)
    removed = lost.replace(number=1).with_origin(removed="layer 1")
    record = record.replace(retrainings=(lost, removed))
    assert "Seeds from which a training diverged (1 of them) are left out" in (explanation(record) or "")
    said = " ".join(sentences(record))
    assert "since trainings from others diverged" in said
    assert "--seeds 10` tries further ones" in said


def test_a_finished_study_says_what_its_minutes_were_spent_on() -> None:
    """Two candidates that overlap; of three retrainings one has learnt from validation too, and one came later."""
    spans = [
        (TrialKind.BASELINE, 0, 50.0),
        (TrialKind.CANDIDATE, 1, 70.0),
        (TrialKind.CANDIDATE, 2, 60.0),
        (TrialKind.DISTILLED, 5, 30.0),
    ]
    trials = [
        bare(number, ne=0.9, flops=1.0, kind=kind, started_at=started(minute), seconds=seconds)
        for number, (kind, minute, seconds) in enumerate(spans)
    ]
    again = {"ne": 0.9, "flops": 1.0, "kind": TrialKind.RETRAINING, "seconds": 45.0}
    retrainings = tuple(
        bare(number, started_at=started(minute), **again) for number, minute in enumerate((6, 7, 9))
    )
    refits = (RefitResult(trial=1, networks=(0,), rows=90, test=metrics(0.9)),)
    record = judged(
        trials,
        seconds_budget=360.0,
        elapsed_seconds=350.0,
        finished=True,
        finished_at=started(8),
        refits=refits,
    )
    record = record.replace(retrainings=retrainings)
    said = where_minutes_went(record)
    assert said == (
        "Of its 5 min 50 s the study has spent 50 s on the baseline, 2 min 00 s on candidates, 30 s on learning "
        "from an average, 45 s on training winners once more, 45 s on retrainings from other seeds, 1 min 00 s on "
        "all else."
    )
    assert said in sentences(record)
    assert where_minutes_went(record.replace(finished=False)) is None
    assert where_minutes_went(record.replace(seconds_budget=None)) is None
