"""What tables show, on the page and in the terminal alike: of each trial, and of each column of a log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from dashboards.names import (
    IN_WORDS,
    byte_size,
    decimals,
    duration,
    known,
    milliseconds,
    percent,
    si,
    trial_name,
)
from dhen.errors import listed
from trials.records.study_record import (
    ColumnFinding,
    StudyRecord,
    relative_ne_curve,
    relative_ne_percent,
)
from trials.records.trial_record import Curve, Metrics, Outcome, TrialKind, TrialRecord


class TrialRow(NamedTuple):
    """One trial and what a table says of it besides; whatever the trial's record has is read from there."""

    trial: TrialRecord
    marks: tuple[str, ...]
    """What the study says of the trial: `baseline`, `best`, `knee`, `front`, in this order."""
    name: str
    """The model in short."""
    quality: Metrics | None
    """Metrics on validation, at the best point of the curve; for a running trial at its newest point."""
    relative_percent: float | None
    """NE relative to the tuned baseline; for a running trial at the same number of examples."""
    remark: str | None
    """Which trial it tunes, whose result it shares, its error; or that its plan does not fit, though trained."""

    @property
    def ne(self) -> float | None:
        """NE on validation, if it is known and finite."""
        return self.quality.ne if self.quality and known(self.quality.ne) else None

    @property
    def heading(self) -> str:
        """The trial's number and marks: `trial 7: best, front`."""
        return f"trial {self.trial.number}" + (f": {', '.join(self.marks)}" if self.marks else "")


def trial_rows(record: StudyRecord, trials: Iterable[TrialRecord] | None = None) -> tuple[TrialRow, ...]:
    """Rows of all trials in order, or of `trials` alone."""
    rows = []
    for trial in record.trials if trials is None else trials:
        baseline, result = record.baseline_for(trial), trial.result
        live = result.outcome is Outcome.RUNNING and bool(result.curve)
        relative = relative_percent(known_ne(trial), known_ne(baseline))
        if live:
            pairs = relative_ne_curve(result.curve[-1:], baseline.result.curve if baseline else Curve())
            relative = pairs[0][1] if pairs and known(pairs[0][1]) else None
        row = TrialRow(
            trial=trial,
            marks=marks(trial, record),
            name=trial_name(trial),
            quality=result.curve[-1].validation if live else result.validation,
            relative_percent=relative,
            remark=_remark(trial),
        )
        rows.append(row)
    return tuple(rows)


def baseline_ne(record: StudyRecord) -> float | None:
    """The tuned baseline's NE on validation, once there is one."""
    return known_ne(find(record, record.baseline))


def known_ne(trial: TrialRecord | None) -> float | None:
    """Returns the NE of a trial on validation; None if there is no trial, or it has none that is a number."""
    validation = trial.result.validation if trial else None
    return validation.ne if validation and known(validation.ne) else None


def find(record: StudyRecord, number: int | None) -> TrialRecord | None:
    """The trial with this number, if the record has it."""
    return next((trial for trial in record.trials if trial.number == number), None)


def relative_percent(ne: float | None, baseline: float | None) -> float | None:
    """NE relative to the baseline in percent if both are known."""
    return relative_ne_percent(ne, baseline) if ne is not None and baseline is not None else None


def winner_reasons(record: StudyRecord) -> dict[int, tuple[str, ...]]:
    """What each winner was chosen as, by its number; none before they are chosen."""
    return {winner.trial: winner.reasons for winner in record.choice.winners} if record.choice else {}


def marks(trial: TrialRecord, record: StudyRecord) -> tuple[str, ...]:
    """What the study says of a trial: any of `baseline`, `best`, `knee`, `front`."""
    holds = {
        "baseline": trial.number == record.baseline,
        "best": trial.number == record.best,
        "knee": trial.number == record.knee,
        "front": trial.number in record.front,
    }
    return tuple(name for name, is_true in holds.items() if is_true)


def _remark(trial: TrialRecord) -> str | None:
    origin, proposal = trial.origin, trial.origin.proposal
    remarks = [f"tuned of trial {origin.tuned_from}" if origin.tuned_from is not None else None]
    if proposal is not None:
        remarks.append(f"proposed{proposal.by_words}" + (f" ({proposal.why})" if proposal.why else ""))
    if origin.distilled_from is not None:
        learnt = f"which learnt from trial {origin.teacher}"
        remarks.append(f"trial {origin.distilled_from}'s network, {learnt}")
    remarks.append(shared_with(trial))
    if origin.promoted_from is not None:
        remarks.append(f"trial {origin.promoted_from} on all rows")
    remarks.append(trial.result.error)
    return ": ".join(remark for remark in remarks if remark) or does_not_fit(trial)


def shared_with(trial: TrialRecord) -> str | None:
    """Which trial's training gave the result, in words; None if it is the trial's own."""
    if trial.origin.reused_from is not None:
        return f"same network as trial {trial.origin.reused_from}"
    origin = trial.origin.reused_from_study
    return f"trained as trial {origin.trial} of the study in {origin.directory}" if origin else None


def does_not_fit(trial: TrialRecord) -> str | None:
    """A sentence that no technique makes the trial fit; a baseline is trained all the same."""
    plan = trial.plan.summary
    if plan is None or plan.fits:
        return None
    return f"does not fit the cluster it is planned for: {plan.remedy or plan.reason}"


def table_bytes_differ(record: StudyRecord) -> bool:
    """Whether candidates that have a result have tables of different sizes, so that there is a choice."""
    sizes = {trial.job.table_bytes for trial in record.candidates if trial.result.validation is not None}
    return len(sizes - {None}) > 1


class ColumnVisibility(StrEnum):
    """The least window in which a column is in the table; a trial's panel has all columns."""

    PHONE = "phone"
    TABLET = "tablet"
    DESK = "desk"
    PANEL = "panel"


class ReportColumn(NamedTuple):
    """A column of numbers, or of words."""

    id: str
    title: str
    shown: ColumnVisibility
    value: Callable[[TrialRow], Any]
    """The number that rows are sorted by, or the word of a column of words."""
    unit: Callable[[float | None], str] | None = None
    """The text of a number; None for a column of words."""

    @property
    def help(self) -> str:
        """What the column shows."""
        return HELP[self.id]

    def cell(self, row: TrialRow) -> tuple[str, float | None]:
        """Returns the text of a row's cell, and its number if it has one that can be sorted by."""
        value = self.value(row)
        if self.unit is None:
            return value or "", None
        return self.unit(value), value if known(value) else None


FORWARD, RANKS, TABLES = "forward", "ranks", "tables"
PHONE, TABLET, DESK, PANEL = (
    ColumnVisibility.PHONE,
    ColumnVisibility.TABLET,
    ColumnVisibility.DESK,
    ColumnVisibility.PANEL,
)
# what a study is about comes first, so that it is seen in any window; a model's name may be long
COLUMNS = (
    ReportColumn("trial", "Trial", PHONE, lambda row: row.trial.number, str),
    ReportColumn("ne", "NE", PHONE, lambda row: row.ne, partial(decimals, digits=5)),
    ReportColumn("relative", "vs baseline", PHONE, lambda row: row.relative_percent, percent),
    ReportColumn("flops", "FLOPs", PHONE, lambda row: row.trial.job.flops, si),
    ReportColumn(
        "technique", "Technique", PHONE, lambda row: row.trial.result.technique or _planned(row.trial)
    ),
    ReportColumn(RANKS, "Ranks", TABLET, lambda row: row.trial.plan.ranks),
    ReportColumn("memory", "Memory", DESK, lambda row: row.trial.plan.peak_bytes, byte_size),
    ReportColumn("model", "Model", TABLET, lambda row: row.name),
    ReportColumn("outcome", "Outcome", TABLET, lambda row: IN_WORDS[row.trial.result.outcome]),
    ReportColumn("time", "Time", DESK, lambda row: row.trial.result.seconds, duration),
    ReportColumn(
        "auc", "AUC", PANEL, lambda row: getattr(row.quality, "auc", None), partial(decimals, digits=4)
    ),
    ReportColumn(
        "calibration",
        "Calibration",
        PANEL,
        lambda row: getattr(row.quality, "calibration", None),
        partial(decimals, digits=3),
    ),
    ReportColumn("parameters", "Dense parameters", PANEL, lambda row: row.trial.job.parameters, si),
    ReportColumn("weights", "Weights", PANEL, lambda row: row.trial.job.weights_bytes, byte_size),
    ReportColumn(TABLES, "Tables", DESK, lambda row: row.trial.job.table_bytes, byte_size),
    ReportColumn(FORWARD, "Forward", DESK, lambda row: row.trial.plan.serving_ms, milliseconds),
    ReportColumn("speed", "Examples/s", PANEL, lambda row: row.trial.result.measured.examples_per_second, si),
    ReportColumn(
        "measured", "Measured peak", PANEL, lambda row: row.trial.result.measured.peak_memory_bytes, byte_size
    ),
    ReportColumn("planned", "Planned", PANEL, lambda row: _planned(row.trial)),
    ReportColumn("executed", "Executed", PANEL, lambda row: row.trial.result.technique),
    ReportColumn("remark", "Remark", PANEL, lambda row: row.remark),
)
HELP = {
    "trial": "in the order of starting",
    "ne": "normalized entropy on validation; lower is better",
    "relative": "NE in percent of the tuned baseline's; negative is better",
    "flops": "FLOPs of a forward pass per example",
    "technique": "memory technique that it was trained with; if it was not trained, the one planned",
    RANKS: "hosts x ranks per host: the least shape in which a technique fits",
    "memory": "predicted peak of the fullest rank of the cluster",
    "model": "modules, ensemble, length of embeddings",
    "outcome": "how the trial ended",
    "time": "wall clock of the trial",
    "auc": "area under the ROC curve on validation",
    "calibration": "sum of predictions over sum of labels on validation; 1 is calibrated",
    "parameters": "number of parameters outside embedding tables",
    "weights": "size of the exported weights in fp32",
    TABLES: "size of embedding tables as training stores them",
    FORWARD: "measured time of a request",
    "speed": "training examples per second, evaluation excluded",
    "measured": (
        "peak of the fullest rank: of the device's memory, on a CPU of the process if nothing is counted"
    ),
    "planned": "memory technique for the cluster: the least that fits",
    "executed": "memory technique as the ranks read it from their wrapped modules",
    "remark": "where it comes from, or why it did not complete",
}
"""What each column shows, by its id."""


def _planned(trial: TrialRecord) -> str:
    """Returns the technique that was planned for a trial; nothing for an average, which nobody trains."""
    return trial.plan.technique or ("" if trial.kind is TrialKind.AVERAGE else "nothing fits")


def columns_of(record: StudyRecord) -> tuple[ReportColumn, ...]:
    """The columns that say something in this study: forward time if it was measured, bytes of tables if
    candidates differ in them, ranks if they may."""
    left_out = set()
    if record.cluster is None or not record.cluster.shapes:
        left_out.add(RANKS)
    if all(trial.plan.serving_ms is None for trial in record.trials):
        left_out.add(FORWARD)
    if not table_bytes_differ(record):
        left_out.add(TABLES)
    return tuple(column for column in COLUMNS if column.id not in left_out)


MOST_LOG_ROWS = 30
"""Number of columns of a log up to which each has a row."""
NAMED = 6
"""Number of columns of a role that are named."""
LOG_EXPLANATION = (
    "`columns.NAME=ROLE` gives a column another role: categorical, numeric, multi_hot, timestamp, weight, "
    "ignore"
)


class PlainTable(NamedTuple):
    """A table of texts."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: Collection[str]
    """Columns of words; the others are numbers."""


def log_table(findings: Sequence[ColumnFinding]) -> PlainTable:
    """The columns of a log: the role of each, the reason, an example; a row for each role if there are many."""
    if len(findings) <= MOST_LOG_ROWS:
        rows = [
            (
                each.name,
                each.role,
                each.why,
                f"{each.distinct:,}",
                f"{decimals(100 * each.missing, 1)} %" if each.missing else "",
                each.example,
            )
            for each in findings
        ]
        titles = ("Column", "Role", "Why", "Distinct", "Missing", "Example")
        return PlainTable(titles, rows, left=("Column", "Role", "Why", "Example"))
    by_role = defaultdict[str, list[ColumnFinding]](list)
    for each in findings:
        by_role[each.role].append(each)
    grouped = [
        (
            role,
            f"{len(group):,}",
            Counter(each.why for each in group).most_common(1)[0][0],
            listed([each.name for each in group], NAMED),
        )
        for role, group in by_role.items()
    ]
    headings = ("Role", "Columns", "Why most of them", "Names")
    return PlainTable(headings, grouped, left=("Role", "Why most of them", "Names"))
