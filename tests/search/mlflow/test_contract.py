"""What scripts and notebooks read of a real study's runs, through MLflow's own client and nothing of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search.read_study import read_study
from trials.records.study_record import StudyRecord

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's, of SQLAlchemy


@pytest.fixture
def runs(study: Path) -> dict[int, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{study}/mlflow.db")
    experiment = client.get_experiment_by_name(study.name)
    found = client.search_runs([experiment.experiment_id], "tags.`trial.number` != ''", max_results=1000)
    return {int(run.data.tags["trial.number"]): run for run in found}


@pytest.fixture
def record(study: Path) -> StudyRecord:
    return read_study(study)


def test_each_trial_has_one_run_with_its_outcome_technique_and_best_ne(
    runs: dict[int, Any], record: StudyRecord
) -> None:
    assert sorted(runs) == [trial.number for trial in record.trials]
    for trial in record.trials:
        data = runs[trial.number].data
        assert data.tags["outcome"] == trial.result.outcome.value
        assert data.tags["technique.planned"] == trial.plan.technique
        assert data.tags["technique.executed"] == trial.result.technique
        assert data.metrics["best_ne"] == trial.result.validation.ne


def test_the_front_of_ne_and_flops_can_be_read_in_mlflow(runs: dict[int, Any], record: StudyRecord) -> None:
    front = [number for number, run in runs.items() if run.data.tags["front"] == "true"]
    metrics = {number: runs[number].data.metrics for number in front}
    by_flops = sorted(front, key=lambda number: metrics[number]["cost/flops"])
    assert by_flops == list(record.front) != []
    ne = [metrics[number]["best_ne"] for number in by_flops]
    assert ne == sorted(ne, reverse=True)
