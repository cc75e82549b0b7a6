"""`tables_from=baseline`: candidates start from the tuned baseline's embedding tables
(`trials.embeddings.warm_tables`).

The baseline's tables come from the study's seed, and the baseline itself had no such start. So retrainings
from other seeds, which decide whether a winner is better, start both from fresh tables.
"""

from __future__ import annotations

from dhen.config import ModelConfig
from dhen.errors import UserError
from dhen.inputs.table_dims import table_groups
from dhen.schema import FeatureSchema
from search.study_state import Standing
from trials.record import TrialKind, TrialRecord


def check_has_tables(baseline: ModelConfig, features: FeatureSchema) -> None:
    """Raises UserError for a log without tables, or a baseline whose tables have several lengths."""
    if len(table_groups(baseline, features)) > 1:
        raise UserError(
            f"tables_from=baseline: the baseline's table_dim_exponent={baseline.table_dim_exponent:g} gives its "
            "tables several lengths, and they cannot lend; give it an exponent of 0, or leave tables_from out."
        )
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
