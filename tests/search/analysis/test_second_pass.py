"""A log of few recurring ids through the command line: real trainings say that a second pass would have helped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import Run
from records import changed, study

from search.analysis.second_pass import try_second_pass
from search.execution.retraining import RetrainingRequest
from search.study_state import StudyState
from trials import job as jobs
from trials.job import Job
from trials.record import Measured, TrialRecord

WORDS = ("space=tiny", "trials=1", "baseline_trials=1", "threads=1", "parallel=1")


def test_a_study_says_that_a_second_pass_would_have_helped(
    dhen_search: Run, click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three thousand rows are a dozen steps per pass, after which nothing has converged."""
    monkeypatch.setattr(jobs, "ONE_PASS_ROWS", 1000)
    out = tmp_path / "study"
    shown = dhen_search("run", "--data", click_log, "--out", out, *WORDS).stdout
    sentence = re.search(
        r"A second pass over the training rows would have helped: NE (\S+) -> (\S+) on validation \(the baseline, "
        r"trial 0\); give a new study training\.epochs=2 or more\.",
        shown,
    )
    assert sentence, shown
    assert float(sentence[2]) < float(sentence[1])
    assert shown.index(sentence[0]) < shown.index("trial 1")  # before the search
    assert sentence[0] in " ".join(dhen_search("status", out).stdout.split())
    assert sentence[0].replace(">", "&gt;") in (out / "report.html").read_text()
    assert sentence[0] in (out / "driver.log").read_text()
    study = json.loads(dhen_search("status", out, "--json").stdout)
    assert [trial["kind"] for trial in study["trials"]] == ["baseline", "candidate"]
    (retraining,) = study["retrainings"]
    assert (retraining["origin"]["of"], retraining["origin"]["passes"]) == (0, 2)
    assert retraining["result"]["test"] is None  # the test split was not looked at for it
    assert not list((out / "retrained").rglob("weights.safetensors"))


class NothingTrained:
    """Stands for a study's retrainings; it keeps what it was asked for."""

    def __init__(self) -> None:
        self.requests: list[RetrainingRequest] = []

    def run(self, wanted: list[RetrainingRequest]) -> dict[str, TrialRecord]:
        self.requests += wanted
        return {}


@pytest.mark.parametrize(("minutes", "tried"), [(None, True), (60.0, True), (10.0, False)])
def test_what_a_reused_baseline_took_elsewhere_counts_against_the_minutes(
    minutes: float | None, tried: bool
) -> None:
    """Its result took no time here; two passes of 100 seconds are more than a tenth of ten minutes."""
    made_up = study(0)
    assert made_up.baseline is not None
    took = Measured(train_seconds=90.0, evaluate_seconds=10.0)
    trained = changed(made_up.trial(made_up.baseline), measured=took)
    baseline = trained.with_result_of(trained).with_result(curve=trained.result.curve[:1])
    state, retrainings = StudyState(made_up.replace(trials=()), [baseline]), NothingTrained()
    job = Job.model_construct()
    try_second_pass(state, retrainings, lambda _: job, minutes=minutes)  # type: ignore[arg-type]
    assert bool(retrainings.requests) is tried
