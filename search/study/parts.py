"""What one study is made of, as its trainings and its finals both need it."""

from __future__ import annotations

from dataclasses import dataclass

from search.config import StudyConfig
from search.execution.trainer import Trainer
from search.planning.admission import Admission
from search.reuse.elsewhere import Elsewhere
from search.reuse.kept_weights import KeptWeights
from search.study.news import News
from search.study_state import Standing
from trials.data.cache import PreparedLog
from trials.storage.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Of one study."""

    config: StudyConfig
    log: PreparedLog
    ledger: Ledger
    standing: Standing
    trainer: Trainer
    admission: Admission
    elsewhere: Elsewhere
    weights: KeptWeights
    news: News
    parallel: int
    """Trainings and scorings side by side."""
