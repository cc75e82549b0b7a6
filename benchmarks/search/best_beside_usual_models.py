"""What a search finds, beside the field's usual baselines, on the same split of a log.

Runs a study through the command line, then trains its best and the tuned AdvancedDLRM baseline again with several
seeds, and a network of two layers of each single interaction module, with the baseline's training settings (the
seeds are others than the study's, whose own trainings were selected). Fits
logistic regression (one-hot ids, standardised numbers) and scikit-learn's histogram gradient boosting (native
categories, early stopping on validation) on the same encoded rows. All are scored on the test split, which took no
part in any choice; differences are paired, and their intervals are over seeds and blocks of rows.

    python -m benchmarks.search.best_beside_usual_models log.csv [more files] [key=value ...] --out runs/quality
        [--trials 30]

A study that is in --out already is taken as it is, if its settings are these.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import hstack
from scipy.special import expit, logit
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import OneHotEncoder

from benchmarks.models.one_network import network_flops, parsed, stacked
from benchmarks.shared.machine_and_tables import machine, markdown, spread
from dashboards.names import trial_name
from dhen.config import ModelConfig
from dhen.members import mean_of_logits
from search.analysis.confirm import fresh_seeds
from search.analysis.losses import block_sums, blocks_of
from search.analysis.statistics import paired_bootstrap
from search.bundles.export import study_log
from search.config import written_config
from search.execution.retraining import score_networks
from search.execution.train_list import train_one
from search.execution.trainer import Trainer, new_record, trained_job
from search.read_study import read_study
from spaces.space import load_space
from trials.data.prepared_log import PreparedLog
from trials.records.events import logits_file
from trials.records.job import Job, TrainingConfig
from trials.records.metrics import evaluate_predictions
from trials.records.study_record import StudyRecord
from trials.records.trial_record import TrialKind, TrialRecord
from trials.runtime.launcher import Launcher

SPLIT = "test"
MOST_CATEGORIES = 255
"""Histogram gradient boosting takes no more; rarer ids share the last."""

Logits = np.ndarray
"""Of the test split's rows (N)."""
Model = Callable[[int], Logits]
"""From a seed."""
Start = Callable[[PreparedLog, Path], Trainer]
"""A trainer in a folder, with as many threads as the study had."""


def arrays(log: PreparedLog, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    part = log.split(split)
    return (
        np.asarray(part.inputs.categorical),
        np.asarray(part.inputs.numeric),
        np.asarray(part.labels, dtype=np.float64),
    )


def logistic_regression(log: PreparedLog) -> Model:
    def fit(seed: int) -> Logits:
        ids, numeric, label = arrays(log, "train")
        one_hot = OneHotEncoder(handle_unknown="ignore")
        model = LogisticRegression(max_iter=1000, random_state=seed)
        model.fit(hstack([one_hot.fit_transform(ids), numeric]).tocsr(), label)
        test_ids, test_numeric, _ = arrays(log, SPLIT)
        found: Logits = model.decision_function(hstack([one_hot.transform(test_ids), test_numeric]).tocsr())
        return found

    return fit


def gradient_boosting(log: PreparedLog) -> Model:
    # trees cut numbers themselves, more finely
    kept = [place for place, table in enumerate(log.features.categorical) if not table.buckets]

    def features(split: str) -> tuple[np.ndarray, np.ndarray]:
        ids, numeric, label = arrays(log, split)
        return np.hstack([np.minimum(ids[:, kept], MOST_CATEGORIES - 1), numeric]), label

    def fit(seed: int) -> Logits:
        x, label = features("train")
        x_validation, validation_label = features("validation")
        categorical = np.arange(x.shape[1]) < len(kept)
        model = HistGradientBoostingClassifier(
            max_iter=1000,
            learning_rate=0.05,
            early_stopping=True,
            categorical_features=categorical,
            random_state=seed,
        )
        model.fit(x, label, X_val=x_validation, y_val=validation_label)
        found: Logits = logit(model.predict_proba(features(SPLIT)[0])[:, 1])
        return found

    return fit


def trained(log: PreparedLog, start: Start, job_of: Callable[[Trainer, int], Job]) -> Model:
    """A network trained on the study's log, in a folder that is gone afterwards."""

    def train(seed: int) -> Logits:
        with tempfile.TemporaryDirectory() as folder:
            trainer = start(log, Path(folder))
            job = job_of(trainer, seed)
            record = new_record(0, TrialKind.CANDIDATE, {}, job)
            record = train_one(record, job, trainer, lambda _: None)
            score_networks([(record, job)], SPLIT, trainer, lambda *_: None, keep_logits=True)
            found: Logits = np.load(logits_file(trainer.folder(record), SPLIT), allow_pickle=False)
            return found

    return train


def again(log: PreparedLog, start: Start, networks: Sequence[TrialRecord]) -> Model:
    """A trial of the study, all networks of an average, from other seeds."""

    def train(seed: int) -> Logits:
        # networks of an average that differ in their seed alone keep doing so
        first = min(network.job.seed for network in networks)
        each = [trained(log, start, partial(_from_seed, network, log, first)) for network in networks]
        return mean_of_logits([one(seed) for one in each], log.schema.negative_sampling_rate)

    return train


def _from_seed(network: TrialRecord, log: PreparedLog, first: int, _: Trainer, seed: int) -> Job:
    return trained_job(network, log, seed_shift=seed - first)


def single_modules(
    record: StudyRecord, log: PreparedLog, start: Start, kinds: Sequence[str]
) -> dict[str, tuple[Model, float]]:
    """Networks of a single interaction module, with their FLOPs, by kind."""
    assert record.baseline is not None
    training = trained_job(record.trial(record.baseline), log).training
    # as they are better where numbers have buckets at all, and as candidates may have them
    buckets: dict[str, Any] = {"buckets": "apart"} if log.features.bucketed else {}
    found = {}
    for kind in kinds:
        model = parsed(stacked(kind, **buckets))
        job = partial(_job, model, training)
        found[f"2x[{kind}]"] = (trained(log, start, job), network_flops(model, log))
    return found


def _job(model: ModelConfig, training: TrainingConfig, trainer: Trainer, seed: int) -> Job:
    return trainer.job(model, training, seed)


class Table:
    """Test metrics of models over seeds, beside a first one that all others are compared with."""

    def __init__(self, log: PreparedLog, seeds: Sequence[int]) -> None:
        self._split, self._rate = log.split(SPLIT), log.schema.negative_sampling_rate
        self._blocks, self._seeds = blocks_of(log, self._split), seeds
        self._first: np.ndarray | None = None
        self.rows: list[list[str]] = []

    def add(self, name: str, model: Model, flops: float | None = None) -> None:
        logits = [model(seed) for seed in self._seeds]
        labels = np.asarray(self._split.labels, dtype=np.float64)
        metrics = [evaluate_predictions(expit(each.astype(np.float64)), labels) for each in logits]
        sums_SK = np.stack([self._sums(each) for each in logits])
        beside = ""
        if self._first is None:
            self._first = sums_SK
        else:
            found = paired_bootstrap(self._first, sums_SK)
            low, high = found.interval()
            beside = f"{found.percent:+.2f} % ({low:+.2f} to {high:+.2f})"
        cells = [spread([getattr(each, key) for each in metrics]) for key in ("ne", "auc", "log_loss")]
        self.rows.append([name, *cells, f"{flops:,.0f}" if flops else "", beside])
        print(f"{name}: NE {cells[0]}", file=sys.stderr, flush=True)

    def _sums(self, logit_N: Logits) -> np.ndarray:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "logits.npy"
            np.save(file, logit_N.astype(np.float32))
            return block_sums([file], self._split, self._rate, self._blocks)


def run_study(data: list[str], out: Path, words: list[str]) -> StudyRecord:
    command = [str(Path(sys.executable).parent / "dhen-search"), "run", "--out", str(out)]
    for each in data:
        command += ["--data", each]
    subprocess.run([*command, *words], check=True)
    return read_study(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds: an interval needs two at least")
    files = [each for each in options.data if "=" not in each]
    words = [each for each in options.data if "=" in each]
    record = run_study(files, options.out, [f"trials={options.trials}", *words])
    log, start = (
        study_log(options.out),
        partial(Trainer, Launcher(), threads=written_config(options.out).threads),
    )
    assert record.best is not None
    assert record.baseline is not None
    best, baseline = record.trial(record.best), record.trial(record.baseline)
    table = Table(log, fresh_seeds(record.seed, options.seeds))
    name = f"best of {len(record.candidates)} candidates: {trial_name(best)}"
    table.add(name, again(log, start, record.networks(best)), best.job.flops)
    table.add("histogram gradient boosting", gradient_boosting(log))
    table.add("logistic regression", logistic_regression(log))
    table.add("AdvancedDLRM, tuned", again(log, start, [baseline]), baseline.job.flops)
    kinds = list(load_space(written_config(options.out).space).config.modules)
    for single, (model, flops) in single_modules(record, log, start, kinds).items():
        table.add(single, model, flops)
    print(machine())
    print(
        f"{record.log.name}: {record.log.rows}; study {record.elapsed_seconds:,.0f} s, {options.seeds} seeds"
    )
    header = ["model", "test NE", "test AUC", "test log loss", "FLOPs", "the best less this, 95 % interval"]
    print(markdown(header, table.rows))


if __name__ == "__main__":
    main()
