"""A study whose winners are trained once more, on the rows of training and validation together; by the command
line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line import AVERAGED, Run
from interrupted import Told, run

from search.bundles.bundle import read_bundle
from search.bundles.export import lost_weights, study_log
from search.config import read_study_config
from search.execution.trainer import trained_job
from search.read_study import read_study
from search.run_directory import TEACHERS, folder_of
from trials.data.log_views import LogWithValidation
from trials.records.events import WEIGHTS
from trials.records.study_record import RefitResult, StudyRecord
from trials.records.trial_record import Outcome, Refit, TrialRecord
from trials.store.weights import read_weights

BOTH = 2
"""Seeds."""
WORDS = (*AVERAGED, "distil=yes")


@pytest.fixture(scope="module")
def refitted(dhen_search: Run, click_log: Path, averaged: Path) -> Path:
    """A study whose winners have learnt from validation too, an average and networks it has taught among them."""
    dhen_search("run", "--data", click_log, "--out", averaged, "refit=yes", *WORDS)
    return averaged


def networks_of(record: StudyRecord, refit: RefitResult) -> list[TrialRecord]:
    return [record.retraining(number) for number in refit.networks]


def test_baseline_and_winners_are_trained_on_both(refitted: Path) -> None:
    record = read_study(refitted)
    assert record.choice is not None
    winners = [winner.trial for winner in record.choice.winners]
    assert {refit.trial for refit in record.refits} == {record.choice.baseline, *winners}
    rows = record.log.rows
    for refit in record.refits:
        before, after = record.networks(record.trial(refit.trial)), networks_of(record, refit)
        assert refit.rows == rows["train"] + rows["validation"]
        assert refit.test != record.trial(refit.trial).result.test
        for one, again in zip(before, after, strict=True):
            ended = Refit.of(one.result.curve)
            assert again.job.refit is not None
            assert again.job.refit.evaluations == ended.evaluations
            assert again.job.refit.lowered_after == ended.lowered_after
            assert (again.job.model, again.job.training, again.job.seed, again.job.teacher) == (
                one.job.model,
                one.job.training,
                one.job.seed,
                one.job.teacher,
            )
            assert again.result.outcome is Outcome.COMPLETED
            assert (folder_of(refitted, again) / WEIGHTS).exists()


def test_they_are_what_training_on_the_rows_of_both_gives_and_a_teacher_has_predicted_all(
    refitted: Path,
) -> None:
    record, log = read_study(refitted), study_log(refitted)
    refit = record.refit(record.baseline)
    assert refit is not None
    (network,) = networks_of(record, refit)
    saved, job = read_weights(folder_of(refitted, network) / WEIGHTS), trained_job(network, log)
    off = []
    for rows in (LogWithValidation(log), log):
        weights = run(job, rows, Told(), None).weights
        off.append(max(float((weights[name] - saved[name]).abs().max()) for name in saved))
    assert off[0] < 1e-5 < 1e-3 < off[1]
    (teacher,) = (refitted / TEACHERS).iterdir()
    assert len(np.load(teacher)) == record.log.rows["train"] + record.log.rows["validation"]
    taught = [each for each in record.retrainings if each.job.teacher is not None]
    assert taught
    assert all(each.result.outcome is Outcome.COMPLETED for each in taught)


def test_the_bundle_has_their_weights(dhen_search: Run, click_log: Path, refitted: Path) -> None:
    record, info = read_study(refitted), read_bundle(refitted / "best").info
    refit = record.refit(record.best)
    assert refit is not None
    assert info.test == refit.test
    assert info.baseline_test == record.refit(record.baseline).test  # type: ignore[union-attr]
    weights = sorted((refitted / "best").glob("weights*.safetensors"))
    networks = networks_of(record, refit)
    assert [file.read_bytes() for file in weights] == [
        (folder_of(refitted, network) / WEIGHTS).read_bytes() for network in networks
    ]
    said = json.loads(dhen_search("verify", refitted / "best", "--data", click_log, "--json").stdout)
    assert said["holds"]
    assert said["splits"]["test"]["now"]["ne"] == pytest.approx(refit.test.ne, abs=1e-6)
    assert said["splits"]["validation"].get("exported") is None


def test_what_tables_of_8_bits_cost_is_measured_on_rows_that_they_have_not_seen(
    dhen_search: Run, click_log: Path, refitted: Path, tmp_path: Path
) -> None:
    words = ("export", refitted / "best", "--int8-tables", "--data", click_log, "--out", tmp_path / "small")
    dhen_search(*words)
    cost = read_bundle(tmp_path / "small").info.int8_tables
    assert cost is not None
    assert cost.split == "test"
    assert cost.fp32.ne == pytest.approx(read_bundle(refitted / "best").info.test.ne, abs=1e-6)  # type: ignore[union-attr]
    verified = json.loads(dhen_search("verify", tmp_path / "small", "--data", click_log, "--json").stdout)
    assert list(verified["splits"]) == ["test"]


def test_it_is_they_that_are_confirmed(refitted: Path) -> None:
    record = read_study(refitted)
    tested = [each for each in record.retrainings if each.result.test is not None]
    confirmed = [each for each in tested if each.job.refit is not None and each.job.seed != 3]
    assert {each.job.seed for each in confirmed} == {4, 5}
    numbers = [refit.trial for refit in record.refits]
    networks = {n.job.fingerprint for number in numbers for n in record.networks(record.trial(number))}
    assert len(confirmed) == BOTH * len(networks)
    assert [each.trial for each in record.comparisons]


def test_networks_that_were_trained_once_more_and_are_gone_are_said(
    dhen_search: Run, refitted: Path, tmp_path: Path
) -> None:
    """Weights of the first trainings are there, but it is these that a bundle has."""
    copy = tmp_path / refitted.name
    shutil.copytree(refitted, copy)
    record = read_study(copy)
    assert lost_weights(record) == ()
    refit = record.refits[-1]
    for network in networks_of(record, refit):
        (folder_of(copy, network) / WEIGHTS).unlink()
    (said,) = lost_weights(record)
    assert f"The weights of trial {refit.trial} are gone" in said
    words = ("export", copy, "--pick", refit.trial, "--out", tmp_path / "bundle")
    (first, *_) = networks_of(record, refit)
    assert f"to train trial {first.origin.of} again" in " ".join(dhen_search(*words, code=2).stderr.split())


def test_what_is_there_is_not_trained_again_and_what_is_lost_comes_back(
    dhen_search: Run, click_log: Path, refitted: Path
) -> None:
    before = read_study(refitted)
    lost = folder_of(refitted, before.retraining(before.refits[0].networks[0])) / WEIGHTS
    kept = lost.read_bytes()
    lost.unlink()
    dhen_search("run", "--data", click_log, "--out", refitted, "refit=yes", *WORDS)
    after = read_study(refitted)
    assert lost.read_bytes() == kept
    assert after.refits == before.refits
    started = [{each.number: each.origin.started_at for each in one.retrainings} for one in (before, after)]
    changed = {number for number in started[0] if started[0][number] != started[1][number]}
    assert changed == {before.refits[0].networks[0]}


def test_a_study_that_is_no_longer_to_has_its_own_networks(
    dhen_search: Run, click_log: Path, refitted: Path
) -> None:
    words = [word for word in WORDS if not word.startswith("confirm")]
    dhen_search("run", "--data", click_log, "--out", refitted, "refit=no", "confirm=0", *words)
    record, info = read_study(refitted), read_bundle(refitted / "best").info
    assert record.refits == ()
    assert all(job.refit is None for job in info.jobs)
    assert info.test == record.trial(record.best or 0).result.test
    said = " ".join(dhen_search("verify", refitted / "best", "--data", click_log).stdout.split())
    assert "validation too" not in said
    page = " ".join((refitted / "report.html").read_text().split())
    assert ", on the rows of training and validation together, each pair in the same order" in page
    compared = record.comparisons[0]
    assert compared.refit
    sliced = dhen_search("slices", refitted, "--pick", compared.trial, "--column", "site", "--json").stdout
    assert json.loads(sliced)["seeds"] == list(compared.seeds)


def test_minutes_ask_for_it_and_winners_that_go_on_learning_have_none(dhen_search: Run) -> None:
    assert read_study_config(None, ["minutes=5"]).refits
    assert read_study_config(None, ["minutes=5"]).distils
    assert not read_study_config(None, ["trials=5"]).refits
    assert not read_study_config(None, ["minutes=5", "refit=no"]).refits
    going_on = read_study_config(None, ["minutes=5", "objective=next_period"])
    assert (going_on.refits, going_on.distils) == (False, False)
    for word, reason in (
        ("distil=yes", "they go on learning from later ones: leave one of the two out"),
        ("refit=yes", "objective=next_period does in any case: leave one of the two out"),
    ):
        said = dhen_search("run", word, "objective=next_period", code=2).stderr
        assert reason in " ".join(said.split())
