"""Ablations and slices of a study's winners in the ledger: the last of each trial, and of each column."""

from __future__ import annotations

import sqlalchemy as sa

from trials.analyses import Ablation, Slices
from trials.storage.database import Database
from trials.storage.schema import ANALYSES

ABLATION, SLICES = "ablation", "slices"
"""Kinds of analyses."""


class Analyses:
    """What was worked out of one study's winners."""

    def __init__(self, database: Database, study: str) -> None:
        self._database, self._study = database, study

    def keep(self, analysis: Ablation | Slices) -> None:
        """Writes an analysis, in place of an earlier one of the same trial and the same column."""
        kind, column = (SLICES, analysis.column) if isinstance(analysis, Slices) else (ABLATION, "")
        key = {"study": self._study, "kind": kind, "trial": analysis.trial, "column": column}
        with self._database.transaction() as connection:
            self._database.upsert(connection, ANALYSES, **key, analysis=analysis.model_dump_json())

    def ablations(self) -> tuple[Ablation, ...]:
        """Returns the ablations, by number of the trial."""
        with self._database.record_errors():
            return tuple(Ablation.model_validate_json(text) for text in self._kept(ABLATION))

    def slices(self) -> tuple[Slices, ...]:
        """Returns the slices, by number of the trial and column."""
        with self._database.record_errors():
            return tuple(Slices.model_validate_json(text) for text in self._kept(SLICES))

    def _kept(self, kind: str) -> list[str]:
        query = sa.select(ANALYSES.c.analysis).where(ANALYSES.c.study == self._study, ANALYSES.c.kind == kind)
        with self._database.transaction() as connection:
            return list(connection.scalars(query.order_by(ANALYSES.c.trial, ANALYSES.c.column)))
