"""A study that begins with what an earlier one has learned, in another space; and from the baseline's tables."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import SMALL, Run, write_log

from search.bundles.export import study_log
from search.config import StudyConfig, read_study_config
from search.execution.trainer import job_on
from search.read_study import read_study
from search.run_directory import STUDY_FILE, trial_folder
from search.samplers import SAMPLERS
from search.samplers.ask_tell import Proposals
from search.samplers.context import CandidatePricer
from search.samplers.optuna_samplers import FIRST_GENERATION, POPULATION
from search.study.reuse import OTHERWISE, OUTSIDE, read_reused
from spaces.space import Candidate, Space, SpaceConfig, catalog, load_space
from trials.data.prepared_log import PreparedLog
from trials.records.events import WEIGHTS
from trials.records.job import Job, TrainingConfig
from trials.records.study_record import StudyRecord
from trials.records.trial_record import TrialRecord

WORDS = ("baseline_trials=1", "training.epochs=2", "threads=1", "parallel=1")


def kinds(trial: TrialRecord) -> set[str]:
    return {module["kind"] for layer in trial.job.model["layers"] for module in layer["modules"]}


def narrowed(record: StudyRecord) -> dict[str, Any]:
    """The tiny space without a module of the worst candidate that the best has not, and wider elsewhere."""
    best = record.trial(record.front[-1])
    others = set().union(*(kinds(trial) for trial in record.candidates)) - kinds(best)
    data = catalog()["tiny"].to_dict()
    del data["modules"][min(others)]
    data["model"]["embedding_dim"] = [4, 8, 16]
    return data


@pytest.fixture
def log(study: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> PreparedLog:
    monkeypatch.setenv("DHEN_SEARCH_CACHE", environment["DHEN_SEARCH_CACHE"])
    return study_log(study)


def reused(study: Path, log: PreparedLog, space: Space, **training: Any) -> Any:
    config = read_study_config(study / STUDY_FILE, [], warm_start=str(study), **training)
    precision = read_study(study).trials[0].job.training["precision"]

    def job_of(candidate: Candidate) -> Job:
        settings = config.training.to_dict() | candidate.training
        return job_on(log, candidate.model, TrainingConfig(**settings), config.seed, precision)

    return read_reused(config, log, space, job_of, lambda record, _: record)


def test_another_space_takes_what_it_holds(
    dhen_search: Run, study: Path, click_log: Path, tmp_path: Path
) -> None:
    """The earlier front comes right after the baseline, with its results and weights, also of a copy that was
    moved twice and is named from another folder; the study goes on when the earlier is gone."""
    earlier, out, space = tmp_path / "moved" / "earlier", tmp_path / "out", tmp_path / "mine.yaml"
    shutil.copytree(study, tmp_path / "copied")
    earlier.parent.mkdir()
    (tmp_path / "copied").rename(tmp_path / "renamed").rename(earlier)
    before = read_study(earlier)
    data = narrowed(before)
    space.write_text(yaml.safe_dump(data))
    words = ("run", "--data", click_log, "--out", out, *WORDS, f"space={space}")
    said = dhen_search(*words, "warm_start=earlier", "trials=2", cwd=earlier.parent).stdout
    words += (f"warm_start={earlier}",)
    (told,) = read_study(out).earlier
    inside = [trial for trial in before.candidates if kinds(trial) <= set(data["modules"])]
    assert (told.candidates, told.reused) == (len(before.candidates), len(inside))
    assert set(told.left) == {OUTSIDE}
    assert f"Warm start: {len(inside)} of {len(before.candidates)} candidates of {earlier}; " in said
    assert "outside this space (layer.block" in said
    shutil.rmtree(earlier)
    assert "Warm start: " in dhen_search(*words, "trials=3").stdout
    after = read_study(out)
    assert (after.earlier, len(after.candidates)) == ((told,), 3)
    first = after.candidates[1]
    best = before.trial(before.front[-1])
    assert (first.job.fingerprint, first.result.validation, first.attempts) == (
        best.job.fingerprint,
        best.result.validation,
        (),
    )
    assert first.origin.reused_from_study is not None
    origin = first.origin.reused_from_study
    assert (origin.directory, origin.trial) == (str(earlier), best.number)
    assert (trial_folder(out, first.number) / WEIGHTS).exists() or first.number not in after.front
    assert "had been trained by earlier studies" in (out / "report.html").read_text()


def test_other_data_and_no_study_are_refused(dhen_search: Run, study: Path, tmp_path: Path) -> None:
    other = write_log(tmp_path / "other.csv", 1000, seed=4)
    words = ("run", "--data", other, "--out", tmp_path / "out", *SMALL, "trials=1")
    said = dhen_search(*words, f"warm_start={study}", code=2).stderr
    there, here = read_study(study).log.fingerprint, said.split("this log's ")[1][:16]
    assert f"its fingerprint is {there}, this log's {here}" in said
    assert there != here
    assert (
        "rows train 3,200, validation 400, test 400 there, train 800, validation 100, test 100 here" in said
    )
    assert "data " in said
    said = dhen_search(*words, "warm_start=nowhere", code=2, cwd=tmp_path).stderr
    assert f"warm_start: {tmp_path / 'nowhere'}: no study here" in said


def test_the_rest_is_left_with_reasons(study: Path, log: PreparedLog) -> None:
    count = len(read_study(study).candidates)
    space = load_space("tiny")
    everything = reused(study, log, space)
    assert [record.number for record in everything.records] == list(range(-count, 0))
    assert everything.studies[0].left == {}
    half = log.manifest.rows["train"] // 2
    once = reused(study, log, space, training={"epochs": 1, "schedule": "constant", "evaluate_every": half})
    assert once.records == ()
    assert once.studies[0].left == {
        OTHERWISE: {"epochs 2, here 1; patience 4, here 2; plateau_factor 1.0, here 0.3": count}
    }
    given = read_study(study).trials[-1].job.training  # a setting that is left out of plain data by default
    part = reused(
        study,
        log,
        space,
        training={"epochs": 2, "train_fraction": 0.5, "evaluate_every": given["evaluate_every"]},
    )
    assert part.studies[0].left == {OTHERWISE: {"train_fraction 1.0, here 0.5": count}}
    small = load_space("tiny").config.to_dict() | {"model": {"embedding_dim": 5, "head": [[]]}}
    left = reused(study, log, Space("small", SpaceConfig.model_validate(small))).studies[0].left
    assert set(left) == {OUTSIDE}
    assert sum(left[OUTSIDE].values()) == count
    assert all(reason.startswith("embedding_dim: ") for reason in left[OUTSIDE])


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_every_sampler_learns_from_them(study: Path, log: PreparedLog, sampler: str) -> None:
    """A whole first generation for NSGA-II; random points of the ranker's startup are other ones than these."""
    space = load_space("tiny")
    known = reused(study, log, space).records
    many = [known[index % len(known)] for index in range(POPULATION)]
    many = [record.replace(number=index - POPULATION) for index, record in enumerate(many)]

    def asked() -> tuple[Any, dict[str, int]]:
        proposals = Proposals(
            sampler=sampler, seed=1, pricer=CandidatePricer(space, log.features, lambda _: True)
        )
        proposals.remember(many)
        return proposals.ask(1, {})

    point, notes = asked()
    assert (point, notes) == asked()
    if sampler == "nsga2":
        assert notes == dict.fromkeys(FIRST_GENERATION, 1)


def test_one_directory_or_several() -> None:
    assert StudyConfig.model_validate({"warm_start": "runs/a"}).warm_start == ("runs/a",)
    assert StudyConfig.model_validate({"warm_start": ["a", "b"]}).warm_start == ("a", "b")
