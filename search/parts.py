"""What one study is made of, as its trainings and its finals both need it."""

from __future__ import annotations

from dataclasses import dataclass

from search.admission import Admission
from search.config import StudyConfig
from search.elsewhere import Elsewhere
from search.news import News
from search.objective import Trainer
from search.standing import Standing
from search.weights import KeptWeights
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
