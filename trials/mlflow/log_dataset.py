"""The log of a study as MLflow's dataset: its name, its fingerprint as digest, where it came from, its columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trials.study_record import LogSummary

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

TYPE_OF_ROLE = {"numeric": "double", "label": "double", "weight": "double", "oracle": "double"}
"""MLflow's type by role; columns of all other roles may hold text."""
MOST_SCHEMA_CHARACTERS = 1_000_000
"""MLflow refuses a longer schema; a log with so many columns has none there."""
DIGEST_CHARACTERS = 36


def dataset_input(log: LogSummary, files: Sequence[str]) -> DatasetInput:
    """Returns the log as an input of a run.

    Args:
        log: what the study's record says of it.
        files: paths of its files, or what stands in their place, as the study was given them.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(
        name=log.name,
        digest=log.fingerprint[:DIGEST_CHARACTERS],
        source_type="local",
        source=json.dumps({"uri": files[0]} if len(files) == 1 else {"uris": list(files)}),
        schema=_schema(log),
        profile=json.dumps(_profile(log)),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])


def _schema(log: LogSummary) -> str | None:
    """Returns the columns in MLflow's form; None where they are not known (older studies), or too many."""
    columns = [
        {"type": TYPE_OF_ROLE.get(role, "string"), "name": name, "required": True}
        for name, role in log.columns.items()
    ]
    text = json.dumps({"mlflow_colspec": columns})
    return text if columns and len(text) <= MOST_SCHEMA_CHARACTERS else None


def _profile(log: LogSummary) -> dict[str, float]:
    """Returns rows and base rate per split, and what models see of a row."""
    rows = {f"rows.{split}": count for split, count in log.rows.items()}
    rates = {f"base_rate.{split}": rate for split, rate in log.base_rate.items()}
    return {**rows, **rates, "tables": log.tables, "numeric": log.numeric}
