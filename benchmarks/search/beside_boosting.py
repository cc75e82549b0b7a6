"""What a study finds beside gradient boosting that was tuned for as many minutes, on the same split of a log.

Runs a study with `minutes=`, then retrains its winners and its baseline from several fresh seeds. CatBoost,
LightGBM, XGBoost and scikit-learn's histogram gradient boosting, as far as they are named with --libraries and
installed, are tuned by Optuna's TPE for as many minutes each, with all cores, on the same encoded rows: native
categories, numbers as they are (trees cut them themselves), trees until validation has not improved for fifty. The
best settings on validation are fitted once more from each seed; where the study's winners are trained once more on
validation too, so are the libraries, with as many trees as that fit had. All are scored on test, which took no
part in any choice.

    python -m benchmarks.search.beside_boosting train.csv test.csv schema_file=schema.yaml --out runs/adult

A study that is in --out already is taken as it is, if its settings are these; its retrainings too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
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
from dhen.members import mean_of_logits
from search.analysis.confirm import BySeed, by_seed, confirming, fresh_seeds
from search.execution.retraining import SPLIT, Retrainings
from search.study.run_session import finished_study
from trials.data.prepared_log import PreparedLog
from trials.records.metrics import evaluate_predictions
from trials.records.study_record import StudyRecord

MOST_TREES, PATIENCE = 3000, 50


@dataclass(frozen=True, kw_only=True, eq=False)
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

    def and_then(self, others: Rows) -> Rows:
        """Returns these rows, then others of the same log, whose columns have the same categories."""
        x = pd.concat([self.x, others.x], ignore_index=True)
        return Rows(x=x, label=np.concatenate([self.label, others.label]), categorical=self.categorical)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A fitted model has logits for rows, and a number of trees."""

    logits: Callable[[Rows], np.ndarray]
    trees: int


Fit = Callable[[dict[str, Any], int, Rows, "Rows | int"], Fitted]
"""From settings, a seed and rows to what was fitted: trees until other rows have not improved, or so many."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library of gradient boosting: what is tuned of it, and how it is fitted."""

    draw: Callable[[optuna.Trial], dict[str, Any]]
    fit: Fit


def lightgbm() -> Library:
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

    def fit(settings: dict[str, Any], seed: int, rows: Rows, until: Rows | int) -> Fitted:
        common = {"subsample_freq": 1, "random_state": seed, "verbosity": -1} | settings
        if isinstance(until, int):
            model = lightgbm.LGBMClassifier(n_estimators=until, **common).fit(rows.x, rows.label)
            trees = until
        else:
            stopping = lightgbm.early_stopping(PATIENCE, verbose=False)
            model = lightgbm.LGBMClassifier(n_estimators=MOST_TREES, **common)
            model.fit(rows.x, rows.label, eval_X=until.x, eval_y=until.label, callbacks=[stopping])
            trees = model.best_iteration_ or MOST_TREES
        return Fitted(logits=lambda some: np.asarray(model.predict(some.x, raw_score=True)), trees=trees)

    return Library(draw=draw, fit=fit)


def xgboost() -> Library:
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

    def fit(settings: dict[str, Any], seed: int, rows: Rows, until: Rows | int) -> Fitted:
        common = {"enable_categorical": True, "tree_method": "hist", "eval_metric": "logloss"}
        common |= {"random_state": seed} | settings
        if isinstance(until, int):
            model = xgboost.XGBClassifier(n_estimators=until, **common).fit(rows.x, rows.label)
            trees = until
        else:
            model = xgboost.XGBClassifier(n_estimators=MOST_TREES, early_stopping_rounds=PATIENCE, **common)
            model.fit(rows.x, rows.label, eval_set=[(until.x, until.label)], verbose=False)
            trees = model.best_iteration + 1
        return Fitted(logits=lambda some: np.asarray(model.predict(some.x, output_margin=True)), trees=trees)

    return Library(draw=draw, fit=fit)


def catboost() -> Library:
    """CatBoost, with ordered statistics of categories."""
    import catboost

    @cache
    def pool(rows: Rows) -> Any:
        # it takes no categories of pandas that are numbers
        return catboost.Pool(
            rows.x.astype(dict.fromkeys(rows.categorical, "int64")), rows.label, rows.categorical
        )

    def draw(trial: optuna.Trial) -> dict[str, Any]:
        return {
            "depth": trial.suggest_int("depth", 4, 10),
            "learning_rate": trial.suggest_float("learning_rate", 0.02, 0.3, log=True),
            "l2_leaf_reg": trial.suggest_float("l2_leaf_reg", 1.0, 20.0, log=True),
            "random_strength": trial.suggest_float("random_strength", 0.1, 10.0, log=True),
            "bagging_temperature": trial.suggest_float("bagging_temperature", 0.0, 1.0),
        }

    def fit(settings: dict[str, Any], seed: int, rows: Rows, until: Rows | int) -> Fitted:
        common = {"random_seed": seed, "verbose": False, "allow_writing_files": False} | settings
        if isinstance(until, int):
            model = catboost.CatBoostClassifier(iterations=until, **common).fit(pool(rows))
        else:
            model = catboost.CatBoostClassifier(
                iterations=MOST_TREES, early_stopping_rounds=PATIENCE, **common
            ).fit(pool(rows), eval_set=pool(until))

        def logits(some: Rows) -> np.ndarray:
            return np.asarray(model.predict(pool(some), prediction_type="RawFormulaVal"))

        return Fitted(logits=logits, trees=model.tree_count_)

    return Library(draw=draw, fit=fit)


def sklearn() -> Library:
    """scikit-learn's histogram gradient boosting."""

    def draw(trial: optuna.Trial) -> dict[str, Any]:
        return {
            "max_leaf_nodes": trial.suggest_int("max_leaf_nodes", 8, 255, log=True),
            "learning_rate": trial.suggest_float("learning_rate", 0.02, 0.3, log=True),
            "min_samples_leaf": trial.suggest_int("min_samples_leaf", 5, 200, log=True),
            "max_features": trial.suggest_float("max_features", 0.3, 1.0),
            "l2_regularization": trial.suggest_float("l2_regularization", 1e-3, 10.0, log=True),
        }

    def fit(settings: dict[str, Any], seed: int, rows: Rows, until: Rows | int) -> Fitted:
        common = {"categorical_features": "from_dtype", "random_state": seed} | settings
        if isinstance(until, int):
            model = HistGradientBoostingClassifier(max_iter=until, early_stopping=False, **common)
            model.fit(rows.x, rows.label)
        else:
            model = HistGradientBoostingClassifier(
                max_iter=MOST_TREES, n_iter_no_change=PATIENCE, early_stopping=True, **common
            )
            model.fit(rows.x, rows.label, X_val=until.x, y_val=until.label)
        return Fitted(
            logits=lambda some: np.asarray(logit(model.predict_proba(some.x)[:, 1])), trees=model.n_iter_
        )

    return Library(draw=draw, fit=fit)


LIBRARIES = {"catboost": catboost, "lightgbm": lightgbm, "xgboost": xgboost, "sklearn": sklearn}


def tuned(name: str, log: PreparedLog, minutes: float, *, refit: bool) -> tuple[Model, int]:
    """Returns a library with its best settings on validation after so many minutes, fitted once more on validation
    too where it is to be, and how many were tried."""
    most = MOST_CATEGORIES if name == "sklearn" else None
    train, validation, test = (Rows.of(log, split, most) for split in ("train", "validation", SPLIT))
    library = LIBRARIES[name]()

    def loss(trial: optuna.Trial) -> float:
        logits = library.fit(library.draw(trial), 0, train, validation).logits(validation)
        return evaluate_predictions(expit(logits.astype(np.float64)), validation.label).log_loss

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(loss, timeout=60.0 * minutes)
    both = train.and_then(validation)

    def on_test(seed: int) -> np.ndarray:
        fitted = library.fit(study.best_params, seed, train, validation)
        if refit:
            fitted = library.fit(study.best_params, seed, both, fitted.trees)
        return fitted.logits(test)

    return on_test, len(study.trials)


def retrained(
    record: StudyRecord, log: PreparedLog, retrainings: Retrainings, seeds: int
) -> tuple[dict[int, Model], list[int]]:
    """The winners and the baseline of a study, retrained from each seed, by trial; and the seeds from which none
    of them diverged."""
    assert record.baseline is not None
    assert record.choice is not None
    done = retrainings.run(confirming(record, log, seeds=seeds), score=SPLIT)
    found: dict[int, Model] = {}
    common = [*fresh_seeds(record.seed, seeds)]
    for number in (*(winner.trial for winner in record.choice.winners), record.baseline):
        networks = record.networks(record.trial(number))
        of_seed = by_seed(networks, record, log, fresh_seeds(record.seed, seeds), done)
        found[number] = partial(_logits, of_seed, log, retrainings)
        common = [seed for seed in common if seed in of_seed]
    return found, common


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
        winners, seeds = retrained(record, log, study.retrainings, options.seeds)
        table = Table(log, seeds)
        reasons = {winner.trial: ", ".join(winner.reasons) for winner in record.choice.winners}
        reasons.setdefault(record.choice.baseline, "the tuned baseline")
        for number in sorted(winners, key=lambda each: each != record.best):
            trial = record.trial(number)
            table.add(f"{reasons[number]}: {trial_name(trial)}", winners[number], trial.job.flops)
    for name in options.libraries:
        model, tried = tuned(name, log, options.minutes, refit=bool(record.refits))
        table.add(f"{name}, {tried} settings tried", model)
    print(machine())
    print(
        f"{record.log.name}: {record.log.rows}; {len(record.candidates)} candidates in "
        f"{record.elapsed_seconds:,.0f} s of the whole command, {len(seeds)} seeds"
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
