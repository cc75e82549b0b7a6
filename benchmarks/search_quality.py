"""What a search finds, beside the field's usual baselines, on the same split of a log.

Runs a study through the command line, then trains the candidate chosen on validation and the tuned
AdvancedDLRM baseline again with several seeds, and fits logistic regression (one-hot ids, standardised
numbers) and scikit-learn's histogram gradient boosting (native categories, early stopping on validation)
on the same encoded rows. All are scored on the test split, which took no part in any choice.

    python benchmarks/search_quality.py log.csv [more files] --out runs/quality [--trials 30] [--seeds 3]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from common import machine, markdown
from scipy.sparse import hstack
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import OneHotEncoder

from search.directory import read_record
from search.export import study_log, trained_job
from search.objective import Trainer, new_record
from trials.data.cache import PreparedLog
from trials.launcher import Launcher
from trials.metrics import evaluate_predictions
from trials.record import Metrics, StudyRecord, TrialKind, TrialRecord

MOST_CATEGORIES = 255
"""Histogram gradient boosting takes no more; rarer ids share the last."""


def arrays(log: PreparedLog, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    part = log.split(split)
    return np.asarray(part.categorical), np.asarray(part.numeric), np.asarray(part.labels, dtype=np.float64)


def logistic_regression(log: PreparedLog, seed: int) -> Metrics:
    ids, numeric, label = arrays(log, "train")
    one_hot = OneHotEncoder(handle_unknown="ignore")
    model = LogisticRegression(max_iter=1000, random_state=seed)
    model.fit(hstack([one_hot.fit_transform(ids), numeric]).tocsr(), label)
    test_ids, test_numeric, test_label = arrays(log, "test")
    p = model.predict_proba(hstack([one_hot.transform(test_ids), test_numeric]).tocsr())[:, 1]
    return evaluate_predictions(p, test_label)


def gradient_boosting(log: PreparedLog, seed: int) -> Metrics:
    def features(split: str) -> tuple[np.ndarray, np.ndarray]:
        ids, numeric, label = arrays(log, split)
        return np.hstack([np.minimum(ids, MOST_CATEGORIES - 1), numeric]), label

    x, label = features("train")
    x_validation, validation_label = features("validation")
    categorical = np.arange(x.shape[1]) < len(log.features.categorical)
    model = HistGradientBoostingClassifier(
        max_iter=1000,
        learning_rate=0.05,
        early_stopping=True,
        categorical_features=categorical,
        random_state=seed,
    )
    model.fit(x, label, X_val=x_validation, y_val=validation_label)
    x_test, test_label = features("test")
    return evaluate_predictions(model.predict_proba(x_test)[:, 1], test_label)


def retrained(log: PreparedLog, trial: TrialRecord, launcher: Launcher) -> Callable[[int], Metrics]:
    def train(seed: int) -> Metrics:
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(launcher, log, Path(folder))
            job = trained_job(trial, log, seed)
            record = new_record(0, TrialKind.CANDIDATE, {}, job)
            record = trainer.train(record, job, lambda _record, _progress: None)
            return trainer.score(record, job, "test")

    return train


def row(name: str, found: Sequence[Metrics], flops: float | None) -> list[str]:
    def cell(key: str) -> str:
        values = [getattr(metrics, key) for metrics in found]
        spread = f" ± {statistics.stdev(values):.5f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):.5f}{spread}"

    return [name, cell("ne"), cell("auc"), cell("log_loss"), f"{flops:,.0f}" if flops else ""]


def run_study(data: list[str], out: Path, trials: int, words: list[str]) -> StudyRecord:
    command = [str(Path(sys.executable).parent / "dhen-search"), "run", "--out", str(out), f"trials={trials}"]
    for each in data:
        command += ["--data", each]
    subprocess.run([*command, *words], check=True)
    return read_record(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    files = [each for each in arguments.data if "=" not in each]
    words = [each for each in arguments.data if "=" in each]
    record = run_study(files, arguments.out, arguments.trials, words)
    log, launcher = study_log(arguments.out), Launcher()
    assert record.best is not None
    assert record.baseline is not None
    best, baseline = record.trial(record.best), record.trial(record.baseline)
    seeds = range(arguments.seeds)
    rows = [
        row("logistic regression", [logistic_regression(log, 0)], None),
        row("histogram gradient boosting", [gradient_boosting(log, seed) for seed in seeds], None),
        row("AdvancedDLRM, tuned", [*map(retrained(log, baseline, launcher), seeds)], baseline.flops),
        row(
            f"chosen by {len(record.candidates)} candidates",
            [*map(retrained(log, best, launcher), seeds)],
            best.flops,
        ),
    ]
    print(machine())
    print(f"{record.log.name}: {record.log.rows}; study {record.elapsed_seconds:,.0f} s")
    print(markdown(["model", "test NE", "test AUC", "test log loss", "FLOPs"], rows))


if __name__ == "__main__":
    main()
