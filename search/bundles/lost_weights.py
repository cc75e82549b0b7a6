"""Whether the weights that a study keeps are still in its run directory, in sentences for its report."""

from __future__ import annotations

from pathlib import Path

from dhen.errors import listed
from search.run_directory import folder_of
from trials.events import WEIGHTS
from trials.record import TrialRecord
from trials.study_record import StudyRecord

MOST_NAMED = 8


def lost_weights(record: StudyRecord) -> tuple[str, ...]:
    """Returns a sentence on the trials that could be exported but for their weights, which are gone; none where
    all are there."""
    directory = Path(record.directory)
    lost = [
        trial.number
        for trial in record.trials
        if trial.number in record.exportable
        and not all(_has_weights(directory, network) for network in record.exported_networks(trial))
    ]
    if not lost:
        return ()
    named = listed([str(number) for number in lost], MOST_NAMED)
    of = "trial" if len(lost) == 1 else "trials"
    return (
        f"The weights of {of} {named} are gone from {directory}: they cannot be exported. "
        f"`dhen-search run --out {directory}` trains them again.",
    )


def _has_weights(directory: Path, network: TrialRecord) -> bool:
    return (folder_of(directory, network) / WEIGHTS).exists()
