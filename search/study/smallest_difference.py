"""The smallest difference of NE that a log can show: between the two best candidates, over its validation rows.

Both are scored on validation once more, for the logits, which averages need anyway. The difference between them
varies from block of rows to block of rows; what that says of the whole split is what no number of seeds can
better. Seeds come on top, so that a comparison of single trainings shows less than this.
"""

from __future__ import annotations

import logging
from functools import partial

from dhen.errors import UserError
from search.analysis.losses import block_sums, blocks_of
from search.analysis.statistics.bootstrap import one_seed_difference
from search.config import StudyConfig
from search.execution.jobs import trained_job
from search.execution.scoring import ScoringRequest, score_networks
from search.execution.trainer import Trainer
from search.pareto import eligible, ne_of
from search.reuse.kept_weights import KeptWeights
from search.study_state import StudyState
from trials.data.cache import PreparedLog
from trials.record import TrialRecord

SPLIT = "validation"
LOG = logging.getLogger(__name__)


class SmallestDifference:
    """Measures the smallest detectable difference of one study, as often as it is asked for."""

    def __init__(
        self,
        config: StudyConfig,
        log: PreparedLog,
        state: StudyState,
        trainer: Trainer,
        weights: KeptWeights,
    ) -> None:
        self._config, self._log, self._state = config, log, state
        self._trainer, self._weights = trainer, weights
        self._known: dict[tuple[int, ...], float] = {}

    def __call__(self) -> float | None:
        """The difference relative to NE (0.001 is 0.1 %) that four of five comparisons of two networks like the
        best would find; None while fewer than two of the best have weights."""
        pair = self._best_two()
        if len(pair) < 2:
            return None
        numbers = tuple(network.number for network in pair)
        if numbers not in self._known:
            try:
                self._known[numbers] = self._measured(pair)
            except UserError as error:
                LOG.info("the smallest detectable difference is not known: %s", error)
                return None
            LOG.info("trials %s differ detectably by %g", numbers, self._known[numbers])
        return self._known[numbers]

    def _best_two(self) -> list[TrialRecord]:
        """The two best candidates that are different networks and have weights."""
        selection = self._state.selection
        kept = {trial.job.fingerprint: trial for trial in (*selection.runners_up, *selection.networks)}
        by_ne = sorted(eligible(kept.values()), key=ne_of)
        return [trial for trial in by_ne[:3] if self._weights.has(trial)][:2]

    def _measured(self, pair: list[TrialRecord]) -> float:
        missing = [network for network in pair if not self._weights.have_logits(network, SPLIT)]
        requests = [ScoringRequest(network, trained_job(network, self._log)) for network in missing]
        score_networks(requests, SPLIT, self._trainer, lambda network, metrics: None, keep_logits=True)
        split, rate = self._log.split(SPLIT), self._log.schema.negative_sampling_rate
        sums = partial(
            block_sums, split=split, rate=rate, blocks=blocks_of(self._log, split, self._config.block_by)
        )
        best_K, second_K = (sums([self._weights.logits(network, SPLIT)]) for network in pair)
        return one_seed_difference(best_K, second_K).detectable() / 100.0
