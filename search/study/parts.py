"""The parts of a study that is opened, which its stages share; `search.study.open_study` puts them together."""

from __future__ import annotations

from dataclasses import dataclass

from search.config import StudyConfig
from search.execution.admission import Admission
from search.execution.budget import Budget
from search.execution.later_stages import LaterStages
from search.execution.trainer import Trainer
from search.samplers.ask_tell import Proposals
from search.study.reuse import WarmStart, WinnerWeights
from search.study.settings import StudySettings
from search.study.tuning import StudyJobs
from search.study_state import StudyState
from spaces.space import Space
from trials.data.prepared_log import PreparedLog
from trials.store.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class StudyParts:
    """What one driver of a study works with."""

    config: StudyConfig
    log: PreparedLog
    space: Space
    jobs: StudyJobs
    ledger: Ledger
    settings: StudySettings
    state: StudyState
    trainer: Trainer
    admission: Admission
    warm_start: WarmStart
    weights: WinnerWeights
    budget: Budget
    later: LaterStages | None
    """What stages behind the search are expected to take; None without minutes."""
    proposals: Proposals
    side_by_side: int
    """Number of trials at the same time."""
