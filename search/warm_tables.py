"""`tables_from=baseline`: candidates start from the tuned baseline's embedding tables (`trials.warm_tables`).

The baseline's tables come from the study's seed, and the baseline itself had no such start. So retrainings
from other seeds, which decide whether a winner is better, start both from fresh tables.
"""

from __future__ import annotations

from dhen.errors import UserError
from dhen.schema import FeatureSchema
from search.standing import Standing
from trials.record import TrialKind, TrialRecord


def check_has_tables(features: FeatureSchema) -> None:
    """Raises UserError for a log without tables."""
    if not features.tables:
        raise UserError("tables_from=baseline: this log has no categorical columns, so there are no tables.")


def tables_owner(standing: Standing) -> TrialRecord:
    """The baseline's trial whose tables candidates start from: the best when the first of them began.

    Another may be the best since, if weights were lost and one was trained again; all candidates start alike.
    """
    begun = next((trial.tables_from for trial in standing.candidates if trial.tables_from), None)
    tuned = (trial for trial in standing.completed if trial.kind is TrialKind.BASELINE)
    best = standing.verdict.baseline
    assert best is not None
    return next((trial for trial in tuned if trial.fingerprint == begun), best)
