"""What scripts and notebooks read of a real study's runs, through MLflow's own client and nothing of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from search.read_study import read_study

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's, of SQLAlchemy


def test_each_trial_has_one_run_and_the_front_of_ne_and_flops_can_be_read(study: Path) -> None:
    from mlflow import MlflowClient

    record, client = read_study(study), MlflowClient(tracking_uri=f"sqlite:///{study}/mlflow.db")
    experiment = client.get_experiment_by_name(study.name)
    found = client.search_runs([experiment.experiment_id], "tags.`trial.number` != ''", max_results=1000)
    runs = {int(run.data.tags["trial.number"]): run.data for run in found}
    assert sorted(runs) == [trial.number for trial in record.trials]
    for trial in record.trials:
        data = runs[trial.number]
        assert data.tags["outcome"] == trial.result.outcome.value
        assert data.tags["technique.planned"] == trial.plan.technique
        assert data.tags["technique.executed"] == trial.result.technique
        assert data.metrics["best_ne"] == trial.result.validation.ne
    front = [number for number, data in runs.items() if data.tags["front"] == "true"]
    by_flops = sorted(front, key=lambda number: runs[number].metrics["cost/flops"])
    assert by_flops == list(record.front) != []
    ne = [runs[number].metrics["best_ne"] for number in by_flops]
    assert ne == sorted(ne, reverse=True)
