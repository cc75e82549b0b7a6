"""What a study finds beside gradient boosting that was tuned for as many minutes, on the same split of a log.

Runs a study with `minutes=`, then retrains its winners and its baseline from several fresh seeds. CatBoost,
LightGBM, XGBoost and scikit-learn's histogram gradient boosting, as far as they are named with --libraries and
installed, are tuned by Optuna's TPE for as many minutes each, with all cores, on the same encoded rows: native
categories, numbers as they are (trees cut them themselves), trees until validation has not improved for fifty. The
best settings on validation are fitted once more from each seed. All are scored on test, which took no part in any
choice.

    python -m benchmarks.search.beside_boosting train.csv test.csv schema_file=schema.yaml --out runs/adult

A study that is in --out already is taken as it is, if its settings are these; its retrainings too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from rich.console import Console
from scipy.special import expit, logit
from sklearn.ensemble import HistGradientBoostingClassifier

from benchmarks.search.best_beside_usual_models import (
    MOST_CATEGORIES,
    Logits,
    Model,
    Table,
    arrays,
    run_study,
)
from benchmarks.shared.machine_and_tables import machine, markdown
from dashboards.names import trial_name
from dhen.averaging import mean_of_logits
from search.analysis.confirm import confirming
from search.analysis.scored import BySeed, by_seed, fresh_seeds
from search.execution.retraining import SPLIT, Retrainings
from search.study.reopen import finished_study
from trials.data.cache import PreparedLog
from trials.metrics import evaluate_predictions
from trials.study_record import StudyRecord

MOST_TREES, PATIENCE = 3000, 50


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A split for trees: categories as they are encoded, then numbers."""

    x: pd.DataFrame
    label: np.ndarray
    categorical: list[str]

    @classmethod
    def of(cls, log: PreparedLog, split: str, most: int | None = None) -> Rows:
        """Rows of a split, with at most so many ids per column: rarer ones share the last."""
        ids, numeric, label = arrays(log, split)
        kept = [place for place, table in enumerate(log.features.categorical) if not table.buckets]
        columns: dict[str, Any] = {}
        for place in kept:
            size = log.features.categorical[place].rows
            values = ids[:, place] if most is None else np.minimum(ids[:, place], most - 1)
            columns[f"c{place}"] = pd.Categorical.from_codes(
                values, categories=range(min(size, most or size))
            )
        names = list(columns)
        columns |= {f"n{place}": numeric[:, place] for place in range(numeric.shape[1])}
        return cls(x=pd.DataFrame(columns), label=label, categorical=names)


Fit = Callable[[dict[str, Any], int], Callable[[Rows], np.ndarray]]
"""From settings and a seed to what gives logits of rows."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library of gradient boosting: what is tuned of it, and how it is fitted."""

    draw: Callable[[optuna.Trial], dict[str, Any]]
    fit: Fit


def lightgbm(train: Rows, validation: Rows) -> Library:
    """LightGBM, with leaf-wise trees."""
    import lightgbm

    def draw(trial: optuna.Trial) -> dict[str, Any]:
        return {
            "num_leaves": trial.suggest_int("num_leaves", 8, 512, log=True),
            "learning_rate": trial.suggest_float("learning_rate", 0.02, 0.3, log=True),
            "min_child_samples": trial.suggest_int("min_child_samples", 5, 200, log=True),
            "colsample_bytree": trial.suggest_float("colsample_bytree", 0.3, 1.0),
            "subsample": trial.suggest_float("subsample", 0.5, 1.0),
            "reg_lambda": trial.suggest_float("reg_lambda", 1e-3, 10.0, log=True),
        }

    def fit(settings: dict[str, Any], seed: int) -> Callable[[Rows], np.ndarray]:
        model = lightgbm.LGBMClassifier(
            n_estimators=MOST_TREES, subsample_freq=1, random_state=seed, verbosity=-1, **settings
        )
        model.fit(
            train.x,
            train.label,
            eval_X=validation.x,
            eval_y=validation.label,
            callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)],
        )
        return lambda rows: np.asarray(model.predict(rows.x, raw_score=True))

    return Library(draw=draw, fit=fit)


def xgboost(train: Rows, validation: Rows) -> Library:
    """XGBoost, with histograms and its own partitions of categories."""
    import xgboost

    def draw(trial: optuna.Trial) -> dict[str, Any]:
        return {
            "max_depth": trial.suggest_int("max_depth", 3, 12),
            "learning_rate": trial.suggest_float("learning_rate", 0.02, 0.3, log=True),
            "min_child_weight": trial.suggest_float("min_child_weight", 0.5, 50.0, log=True),
            "colsample_bytree": trial.suggest_float("colsample_bytree", 0.3, 1.0),
            "subsample": trial.suggest_float("subsample", 0.5, 1.0),
            "reg_lambda": trial.suggest_float("reg_lambda", 1e-2, 20.0, log=True),
        }

    def fit(settings: dict[str, Any], seed: int) -> Callable[[Rows], np.ndarray]:
        model = xgboost.XGBClassifier(
            n_estimators=MOST_TREES,
            early_stopping_rounds=PATIENCE,
            enable_categorical=True,
            tree_method="hist",
            eval_metric="logloss",
            random_state=seed,
            **settings,
        )
        model.fit(train.x, train.label, eval_set=[(validation.x, validation.label)], verbose=False)
        return lambda rows: np.asarray(model.predict(rows.x, output_margin=True))

    return Library(draw=draw, fit=fit)


def catboost(train: Rows, validation: Rows) -> Library:
    """CatBoost, with ordered statistics of categories."""
    import catboost

    def pool(rows: Rows) -> Any:
        # it takes no categories of pandas that are numbers
        return catboost.Pool(
            rows.x.astype(dict.fromkeys(rows.categorical, "int64")), rows.label, rows.categorical
        )

    train_pool, validation_pool = pool(train), pool(validation)

    def draw(trial: optuna.Trial) -> dict[str, Any]:
        return {
            "depth": trial.suggest_int("depth", 4, 10),
            "learning_rate": trial.suggest_float("learning_rate", 0.02, 0.3, log=True),
            "l2_leaf_reg": trial.suggest_float("l2_leaf_reg", 1.0, 20.0, log=True),
            "random_strength": trial.suggest_float("random_strength", 0.1, 10.0, log=True),
            "bagging_temperature": trial.suggest_float("bagging_temperature", 0.0, 1.0),
        }

    def fit(settings: dict[str, Any], seed: int) -> Callable[[Rows], np.ndarray]:
        model = catboost.CatBoostClassifier(
            iterations=MOST_TREES,
            early_stopping_rounds=PATIENCE,
            random_seed=seed,
            verbose=False,
            allow_writing_files=False,
            **settings,
        )
        model.fit(train_pool, eval_set=validation_pool)
        return lambda rows: np.asarray(model.predict(pool(rows), prediction_type="RawFormulaVal"))

    return Library(draw=draw, fit=fit)


def sklearn(train: Rows, validation: Rows) -> Library:
    """scikit-learn's histogram gradient boosting."""

    def draw(trial: optuna.Trial) -> dict[str, Any]:
        return {
            "max_leaf_nodes": trial.suggest_int("max_leaf_nodes", 8, 255, log=True),
            "learning_rate": trial.suggest_float("learning_rate", 0.02, 0.3, log=True),
            "min_samples_leaf": trial.suggest_int("min_samples_leaf", 5, 200, log=True),
            "max_features": trial.suggest_float("max_features", 0.3, 1.0),
            "l2_regularization": trial.suggest_float("l2_regularization", 1e-3, 10.0, log=True),
        }

    def fit(settings: dict[str, Any], seed: int) -> Callable[[Rows], np.ndarray]:
        model = HistGradientBoostingClassifier(
            max_iter=MOST_TREES,
            n_iter_no_change=PATIENCE,
            early_stopping=True,
            categorical_features="from_dtype",
            random_state=seed,
            **settings,
        )
        model.fit(train.x, train.label, X_val=validation.x, y_val=validation.label)
        return lambda rows: np.asarray(logit(model.predict_proba(rows.x)[:, 1]))

    return Library(draw=draw, fit=fit)


LIBRARIES = {"catboost": catboost, "lightgbm": lightgbm, "xgboost": xgboost, "sklearn": sklearn}


def tuned(name: str, log: PreparedLog, minutes: float) -> tuple[Model, int]:
    """A library with its best settings on validation after so many minutes, and how many were tried."""
    most = MOST_CATEGORIES if name == "sklearn" else None
    train, validation, test = (Rows.of(log, split, most) for split in ("train", "validation", SPLIT))
    library = LIBRARIES[name](train, validation)

    def loss(trial: optuna.Trial) -> float:
        logits = library.fit(library.draw(trial), 0)(validation)
        return evaluate_predictions(expit(logits.astype(np.float64)), validation.label).log_loss

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(loss, timeout=60.0 * minutes)
    return lambda seed: library.fit(study.best_params, seed)(test), len(study.trials)


def retrained(
    record: StudyRecord, log: PreparedLog, retrainings: Retrainings, seeds: int
) -> dict[int, Model]:
    """The winners and the baseline of a study, retrained from each seed, by trial."""
    assert record.baseline is not None
    assert record.choice is not None
    done = retrainings.run(confirming(record, log, seeds=seeds), score=SPLIT)
    found: dict[int, Model] = {}
    for number in (*(winner.trial for winner in record.choice.winners), record.baseline):
        networks = record.networks(record.trial(number))
        of_seed = by_seed(networks, record, log, fresh_seeds(record.seed, seeds), done)
        found[number] = partial(_logits, of_seed, log, retrainings)
    return found


def _logits(of_seed: BySeed, log: PreparedLog, retrainings: Retrainings, seed: int) -> Logits:
    each = [np.load(retrainings.logits(network), allow_pickle=False) for network in of_seed[seed]]
    return mean_of_logits(each, log.schema.negative_sampling_rate)


def main() -> None:
    """Prints a row for each winner, the baseline, and each library."""
    options = _options()
    files = [each for each in options.data if "=" not in each]
    words = [each for each in options.data if "=" in each]
    run_study(files, options.out, [f"minutes={options.minutes:g}", *words])
    with finished_study(options.out, Console(stderr=True)) as study:
        record, log = study.record, study.log
        assert record.choice is not None
        winners = retrained(record, log, study.retrainings, options.seeds)
        table = Table(log, fresh_seeds(record.seed, options.seeds))
        reasons = {winner.trial: ", ".join(winner.reasons) for winner in record.choice.winners}
        reasons.setdefault(record.choice.baseline, "the tuned baseline")
        for number in sorted(winners, key=lambda each: each != record.best):
            trial = record.trial(number)
            table.add(f"{reasons[number]}: {trial_name(trial)}", winners[number], trial.job.flops)
    for name in options.libraries:
        model, tried = tuned(name, log, options.minutes)
        table.add(f"{name}, {tried} settings tried", model)
    print(machine())
    print(
        f"{record.log.name}: {record.log.rows}; {len(record.candidates)} candidates in "
        f"{record.elapsed_seconds:,.0f} s of the whole command, {options.seeds} seeds"
    )
    header = ["model", "test NE", "test AUC", "test log loss", "FLOPs", "the best less this, 95 % interval"]
    print(markdown(header, table.rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+", help="files of the log, and key=value settings of the study")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--libraries", nargs="*", choices=LIBRARIES, default=list(LIBRARIES))
    return parser.parse_args()


if __name__ == "__main__":
    main()
