"""What answers a sampler in place of a training: a made-up function, or a surrogate of really trained candidates.

Both know the NE that is expected of any candidate (`ne`), what a training of it would show (`measured`, with
noise), how it would come there (`curve`) and how long that would take (`seconds`).
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from scipy.stats import kendalltau
from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor
from sklearn.feature_extraction import DictVectorizer
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel
from sklearn.model_selection import KFold
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.search.candidate_table import read_table
from dhen.schema import FeatureSchema, Table
from search.samplers.context import CandidatePricer, PricedCandidate
from spaces.space import Space, load_space
from trials.records.trial_record import CurvePoint, Metrics

FOLDS = 5
TABLES, NUMERIC = 20, 8
"""Of the made-up log."""
WORTH = {
    "dlrm": 0.8,
    "mlp": 0.7,
    "dcn_v2": 1.0,
    "attention": 0.55,
    "cross": 0.5,
    "linear": 0.25,
    "conv": 0.35,
}
TOGETHER = {
    ("dcn_v2", "mlp"): 0.5,
    ("dlrm", "linear"): 0.45,
    ("attention", "conv"): 0.4,
    ("cross", "mlp"): 0.35,
    ("dcn_v2", "dlrm"): -0.2,
}
OTHERS = 0.4
"""What any other module is worth."""
NOISE = 0.0007
JOINED = {"concat": 1.1, "weighted_sum": 1.05}


class Answers(Protocol):
    """In place of trainings."""

    space: Space
    features: FeatureSchema
    reference: tuple[float, float]
    """log10 FLOPs and NE up to which the front's area counts."""

    def ne(self, priced: PricedCandidate) -> float: ...

    def measured(self, priced: PricedCandidate, rng: random.Random) -> float: ...

    def curve(self, priced: PricedCandidate, ne: float) -> tuple[CurvePoint, ...]: ...

    def seconds(self, priced: PricedCandidate) -> float: ...


class Synthetic:
    """NE as the field knows it: modules help less the more there are, some help each other, depth fades, learning
    rates have a best value that depends on size, and large networks overfit without dropout."""

    def __init__(self, space: str = "default") -> None:
        self.space = load_space(space)
        tables = tuple(Table(name=f"c{index}", rows=1000) for index in range(TABLES))
        self.features = FeatureSchema(tables=tables, numeric=tuple(f"n{index}" for index in range(NUMERIC)))
        self.reference = (7.0, 0.775)

    def ne(self, priced: PricedCandidate) -> float:
        model, training = priced.candidate.model, priced.candidate.training
        worth = sum(self._layer(layer) * 0.6**index for index, layer in enumerate(model.layers))
        worth *= (model.embedding_dim / 16) ** (0.15 if model.embedding_dim <= 16 else -0.1)
        size = math.log10(max(priced.parameters, 1)) - 5
        overfit = 0.004 * max(0.0, size - 0.2) ** 2 * (0.4 if model.dropout > 0 else 1.0)
        return 0.80 - 0.06 * (1 - math.exp(-0.55 * worth)) + overfit + self._training(training, size, model)

    def measured(self, priced: PricedCandidate, rng: random.Random) -> float:
        return self.ne(priced) + rng.gauss(0.0, NOISE)

    def curve(self, priced: PricedCandidate, ne: float) -> tuple[CurvePoint, ...]:
        return curve_of([(1, 0.0, ne)])

    def seconds(self, priced: PricedCandidate) -> float:
        return 5.0 + priced.flops / 2e5

    def _layer(self, layer: Any) -> float:
        kinds = [block.kind for block in layer.modules]
        worth = sum(WORTH.get(kind, OTHERS) / (1 + kinds[:i].count(kind)) for i, kind in enumerate(kinds))
        worth += sum(gain for pair, gain in TOGETHER.items() if set(pair) <= set(kinds))
        worth += sum(0.1 * (getattr(block, "layers", 1) - 1) for block in layer.modules)
        worth += sum(0.1 * (getattr(block, "heads", 1) - 1) for block in layer.modules)
        worth *= JOINED.get(layer.ensemble.kind, 1.0) if len(kinds) > 1 else 1.0
        return float(worth * (layer.out_embeddings / 16) ** 0.15 * (1.05 if layer.raw_numeric else 1.0))

    @staticmethod
    def _training(training: dict[str, Any], size: float, model: Any) -> float:
        rate = math.log(training.get("learning_rate", 0.0025) / 0.0025) + 0.35 * size
        embedding_rate = math.log(training.get("embedding_learning_rate", 0.1) / 0.1)
        decay = math.log10(training.get("embedding_decay", 10**-4.5)) + 4.5
        decay += 0.4 * math.log2(model.embedding_dim / 16)
        return 0.0035 * rate**2 + 0.002 * embedding_rate**2 + 0.0006 * decay**2


@dataclass(frozen=True)
class Check:
    """How well a surrogate predicts candidates that it has not seen."""

    tau: float
    """Kendall's, over all."""
    tau_of_better_half: float
    error: float
    """Standard deviation of what is left, over the better half: noise of a training, and what it does not know."""


class Surrogate:
    """Fitted to a table: trees (boosted and extremely randomised, averaged) or a Gaussian process.

    It sees candidates otherwise than samplers do (`seen`), or those that see them alike would have it easy.
    """

    def __init__(self, path: Path, kind: str, noise: float | None) -> None:
        self.space, self.features, rows = read_table(path)
        pricer = CandidatePricer(self.space, self.features, lambda _: True)
        priced_rows = [(pricer.price(row["point"]), row) for row in rows]
        known = [(a, row) for a, row in priced_rows if a is not None and row["ne"] is not None]
        self._encoder = DictVectorizer(sparse=False)
        x_NF = self._encoder.fit_transform([seen(priced) for priced, _ in known])
        ne_N = np.array([row["ne"] for _, row in known])
        log_flops = [math.log10(priced.flops) for priced, _ in known]
        self.reference = (max(log_flops), float(np.quantile(ne_N, 0.75)))
        self._kind = kind
        self._floor = float(ne_N.min() - 0.5 * (np.median(ne_N) - ne_N.min()))
        most = float(np.quantile(ne_N, 0.98))
        y_N = np.log(np.minimum(ne_N, most) - self._floor)
        self.check = self._checked(x_NF, y_N, ne_N)
        self.noise = self.check.error if noise is None else noise
        self._models = _fitted(kind, x_NF, y_N)
        seconds_N = np.array([max(row["seconds"] or 0.0, 1e-3) for _, row in known])
        self._likeness = make_pipeline(StandardScaler(), KNeighborsRegressor(1))
        self._likeness.fit(x_NF, np.arange(len(known)))
        self._curves = [(row["ne"], row["curve"]) for _, row in known]
        self._seconds = HistGradientBoostingRegressor(random_state=0).fit(x_NF, np.log(seconds_N))

    def ne(self, priced: PricedCandidate) -> float:
        return self._floor + math.exp(_mean(self._models, self._encoded(priced))[0])

    def measured(self, priced: PricedCandidate, rng: random.Random) -> float:
        return self.ne(priced) + rng.gauss(0.0, self.noise)

    def curve(self, priced: PricedCandidate, ne: float) -> tuple[CurvePoint, ...]:
        """Of the candidate of the table that is most like it, moved so that its best is `ne`."""
        nearest = self._likeness.predict(self._encoded(priced))[0]
        final, points = self._curves[round(nearest)]
        return curve_of([(examples, seconds, ne + then - final) for examples, seconds, then in points])

    def seconds(self, priced: PricedCandidate) -> float:
        return math.exp(self._seconds.predict(self._encoded(priced))[0])

    def _encoded(self, priced: PricedCandidate) -> np.ndarray:
        x_1F: np.ndarray = self._encoder.transform([seen(priced)])
        return x_1F

    def _checked(self, x_NF: np.ndarray, y_N: np.ndarray, ne_N: np.ndarray) -> Check:
        """By cross-validation."""
        found_N = np.empty_like(ne_N)
        for train, test in KFold(FOLDS, shuffle=True, random_state=0).split(x_NF):
            found_N[test] = _mean(_fitted(self._kind, x_NF[train], y_N[train]), x_NF[test])
        found_N = self._floor + np.exp(found_N)
        better = ne_N <= np.median(ne_N)
        return Check(
            tau=kendalltau(found_N, ne_N)[0],
            tau_of_better_half=kendalltau(found_N[better], ne_N[better])[0],
            error=float(np.std(ne_N[better] - found_N[better])),
        )


def seen(priced: PricedCandidate) -> dict[str, float]:
    """A candidate as a surrogate sees it: the value of each setting one-hot, modules counted, rates as logarithms.

    Costs are not among it, nor sizes as numbers, which the ranker sees.
    """
    model = priced.candidate.model
    found: dict[str, float] = defaultdict(float, {f"depth={len(model.layers)}": 1.0})
    for layer in model.to_dict()["layers"]:
        share = 1.0 / len(model.layers)
        for block in layer.pop("modules"):
            found[block["kind"]] += share
            for key, value in block.items():
                found[f"{block['kind']}.{key}={value}"] += share
        for key, value in layer.items():
            found[f"layer.{key}={value}"] += share
    for key, value in model.to_dict().items():
        if key != "layers":
            found[f"{key}={value}"] += 1.0
    for key, value in priced.candidate.training.items():
        if isinstance(value, str):
            found[f"{key}={value}"] = 1.0
        else:
            found[key] = math.log(value) if isinstance(value, float) and value > 0 else float(value)
    return dict(found)


def curve_of(points: Iterable[tuple[int, float, float]]) -> tuple[CurvePoint, ...]:
    """From examples, seconds and NE."""
    return tuple(
        CurvePoint(
            examples=examples,
            epoch=0.0,
            train_loss=0.0,
            learning_rate=0.0,
            seconds=seconds,
            validation=metrics(ne),
        )
        for examples, seconds, ne in points
    )


def metrics(ne: float) -> Metrics:
    """Of which NE alone is known."""
    return Metrics(ne=ne, log_loss=0.0, auc=0.5, calibration=1.0, examples=0)


def _fitted(kind: str, x_NF: np.ndarray, y_N: np.ndarray) -> list[Any]:
    if kind == "gp":
        kernel = (
            ConstantKernel(1.0) * RBF(8.0) + ConstantKernel(0.3) * Matern(10.0, nu=1.5) + WhiteKernel(0.1)
        )
        return [GaussianProcessRegressor(kernel, normalize_y=True, random_state=0).fit(x_NF, y_N)]
    boosted = HistGradientBoostingRegressor(
        learning_rate=0.05, max_iter=250, max_leaf_nodes=12, min_samples_leaf=8, random_state=0
    )
    trees = ExtraTreesRegressor(100, min_samples_leaf=2, max_features=0.6, random_state=0)
    return [boosted.fit(x_NF, y_N), trees.fit(x_NF, y_N)]


def _mean(models: Sequence[Any], x_NF: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.mean([model.predict(x_NF) for model in models], axis=0)
    return found
