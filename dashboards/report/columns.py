"""The table of trials: its columns, what each says of a trial, and how wide a window must be to show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from dashboards.figures.table_bytes import table_bytes_differ
from dashboards.rows import TrialRow
from dashboards.sentences.summary import IN_WORDS
from dashboards.units import byte_size, decimals, duration, known, milliseconds, percent, si
from trials.record import TrialKind, TrialRecord
from trials.study_record import StudyRecord


class Shown(StrEnum):
    """The least window in which a column is in the table; a trial's panel has all columns."""

    PHONE = "phone"
    TABLET = "tablet"
    DESK = "desk"
    PANEL = "panel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of numbers, or of words."""

    id: str
    title: str
    help: str
    shown: Shown
    number: Callable[[TrialRow], float | None] | None = None
    """The value that rows are sorted by; None for a column of words."""
    words: Callable[[TrialRow], str | None] | None = None
    """The text of a column of words."""
    unit: Callable[[float | None], str] = str
    """The text of a number."""

    def cell(self, row: TrialRow) -> tuple[str, float | None]:
        """Returns the text of a row's cell, and its number where it has one that can be sorted by."""
        if self.number is None:
            return (self.words(row) if self.words else None) or "", None
        value = self.number(row)
        return self.unit(value), value if known(value) else None


FORWARD, RANKS, TABLES = "forward", "ranks", "tables"
# what a study is about comes first, so that it is seen in any window; a model's name may be long
COLUMNS = (
    Column(
        id="trial",
        title="Trial",
        help="in the order of starting",
        shown=Shown.PHONE,
        number=lambda row: row.trial.number,
    ),
    Column(
        id="ne",
        title="NE",
        help="normalized entropy on validation; lower is better",
        shown=Shown.PHONE,
        number=lambda row: row.ne,
        unit=partial(decimals, digits=5),
    ),
    Column(
        id="relative",
        title="vs baseline",
        help="NE in percent of the tuned baseline's; negative is better",
        shown=Shown.PHONE,
        number=lambda row: row.relative_percent,
        unit=percent,
    ),
    Column(
        id="flops",
        title="FLOPs",
        help="FLOPs of a forward pass per example",
        shown=Shown.PHONE,
        number=lambda row: row.trial.job.flops,
        unit=si,
    ),
    Column(
        id="technique",
        title="Technique",
        help="memory technique that it was trained with; where it was not trained, the one planned",
        shown=Shown.PHONE,
        words=lambda row: row.trial.result.technique or _planned(row.trial),
    ),
    Column(
        id=RANKS,
        title="Ranks",
        help="hosts x ranks per host: the least shape in which a technique fits",
        shown=Shown.TABLET,
        words=lambda row: row.trial.plan.ranks,
    ),
    Column(
        id="memory",
        title="Memory",
        help="predicted peak of the fullest rank of the cluster",
        shown=Shown.DESK,
        number=lambda row: row.trial.plan.peak_bytes,
        unit=byte_size,
    ),
    Column(
        id="model",
        title="Model",
        help="modules, ensemble, length of embeddings",
        shown=Shown.TABLET,
        words=lambda row: row.name,
    ),
    Column(
        id="outcome",
        title="Outcome",
        help="how the trial ended",
        shown=Shown.TABLET,
        words=lambda row: IN_WORDS[row.trial.result.outcome],
    ),
    Column(
        id="time",
        title="Time",
        help="wall clock of the trial",
        shown=Shown.DESK,
        number=lambda row: row.trial.result.seconds,
        unit=duration,
    ),
    Column(
        id="auc",
        title="AUC",
        help="area under the ROC curve on validation",
        shown=Shown.PANEL,
        number=lambda row: row.quality.auc if row.quality else None,
        unit=partial(decimals, digits=4),
    ),
    Column(
        id="calibration",
        title="Calibration",
        help="sum of predictions over sum of labels on validation; 1 is calibrated",
        shown=Shown.PANEL,
        number=lambda row: row.quality.calibration if row.quality else None,
        unit=partial(decimals, digits=3),
    ),
    Column(
        id="parameters",
        title="Dense parameters",
        help="number of parameters outside embedding tables",
        shown=Shown.PANEL,
        number=lambda row: row.trial.job.parameters,
        unit=si,
    ),
    Column(
        id="weights",
        title="Weights",
        help="size of the exported weights in fp32",
        shown=Shown.PANEL,
        number=lambda row: row.trial.job.weights_bytes,
        unit=byte_size,
    ),
    Column(
        id=TABLES,
        title="Tables",
        help="size of embedding tables as training stores them",
        shown=Shown.DESK,
        number=lambda row: row.trial.job.table_bytes,
        unit=byte_size,
    ),
    Column(
        id=FORWARD,
        title="Forward",
        help="measured time of a request",
        shown=Shown.DESK,
        number=lambda row: row.trial.plan.serving_ms,
        unit=milliseconds,
    ),
    Column(
        id="speed",
        title="Examples/s",
        help="training examples per second, evaluation excluded",
        shown=Shown.PANEL,
        number=lambda row: row.trial.result.measured.examples_per_second,
        unit=si,
    ),
    Column(
        id="measured",
        title="Measured peak",
        help="peak of the fullest rank: of the device's memory, on a CPU of the process where nothing is counted",
        shown=Shown.PANEL,
        number=lambda row: row.trial.result.measured.peak_memory_bytes,
        unit=byte_size,
    ),
    Column(
        id="planned",
        title="Planned",
        help="memory technique for the cluster: the least that fits",
        shown=Shown.PANEL,
        words=lambda row: _planned(row.trial),
    ),
    Column(
        id="executed",
        title="Executed",
        help="memory technique as the ranks read it from their wrapped modules",
        shown=Shown.PANEL,
        words=lambda row: row.trial.result.technique,
    ),
    Column(
        id="remark",
        title="Remark",
        help="where it comes from, or why it did not complete",
        shown=Shown.PANEL,
        words=lambda row: row.remark,
    ),
)


def _planned(trial: TrialRecord) -> str:
    """Returns the technique that was planned for a trial; nothing for an average, which nobody trains."""
    return trial.plan.technique or ("" if trial.kind is TrialKind.AVERAGE else "nothing fits")


def columns_of(record: StudyRecord) -> tuple[Column, ...]:
    """The columns that say something in this study: forward time where it was measured, bytes of tables where
    candidates differ in them, ranks where they may."""
    left_out = set()
    if record.cluster is None or not record.cluster.shapes:
        left_out.add(RANKS)
    if all(trial.plan.serving_ms is None for trial in record.trials):
        left_out.add(FORWARD)
    if not table_bytes_differ(record):
        left_out.add(TABLES)
    return tuple(column for column in COLUMNS if column.id not in left_out)
