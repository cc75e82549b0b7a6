"""Networks trained one at a time, for benchmarks that compare their NE."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from dhen.config import ModelConfig
from dhen.cost import headline_flops
from dhen.model import model_cost, parse_model
from search.execution.train_list import train_one
from search.execution.trainer import Trainer, new_record
from trials.data.prepared_log import PreparedLog
from trials.records.job import TrainingConfig
from trials.records.trial_record import TrialKind
from trials.runtime.launcher import Launcher

DHEN: dict[str, Any] = {
    "family": "dhen",
    "embedding_dim": 16,
    "numeric_mlp": [64],
    "head": [64],
    "dropout": 0.1,
}
"""What a plain DHEN has, but for its layers."""


MODEL_KEYS = ("buckets", "members")


def stacked(*modules: str | dict[str, Any], layers: int = 2, **others: Any) -> dict[str, Any]:
    """A network of equal layers of these modules; `others` of the layer, or of the model."""
    layer = {"modules": list(modules), "ensemble": "sum", "out_embeddings": 16}
    own = {key: value for key, value in others.items() if key in MODEL_KEYS}
    layer |= {key: value for key, value in others.items() if key not in own}
    return DHEN | own | {"layers": [layer] * layers}


def network_flops(model: ModelConfig, log: PreparedLog) -> float:
    """Forward, an example."""
    return headline_flops(model_cost(model, log.features))


def validation_ne(
    log: PreparedLog, launcher: Launcher, model: ModelConfig, training: TrainingConfig, seed: int
) -> float:
    """Of one training, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(launcher, log, Path(folder), threads=1)
        job = trainer.job(model, training, seed)
        record = new_record(0, TrialKind.CANDIDATE, {}, job)
        result = train_one(record, job, trainer, lambda _: None).result
    return result.validation.ne if result.validation is not None else float("nan")


def parsed(data: dict[str, Any]) -> ModelConfig:
    """A model from plain data."""
    return parse_model(data, "network")
