"""A table as trained: relative NE by milestone with intervals, and what it says of the paper's findings.

`TableResult` is the shape of `--json` and of the file beside the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from dhen.errors import UserError
from dhen.values import Value
from search.analysis.reproduce.config import TableConfig
from search.analysis.reproduce.tables import Claim, Row, Table
from search.analysis.statistics.t_interval import compared
from trials.analyses import Better, MeanInterval
from trials.job import Job
from trials.record import TrialRecord

SOURCE = (
    "The paper's values (arXiv 2203.11014) were read from a secondary source; its log is not public, and "
    "larger by orders of magnitude."
)
Curve = tuple[float | None, ...]
"""NE by milestone, or by seed; None where a training did not get there."""


class RowResult(Value):
    """Results of one model."""

    name: str
    flops: float
    """FLOPs of the forward pass per example."""
    parameters: int
    """Number of dense parameters."""
    ne: tuple[Curve, ...]
    """NE on validation, by seed."""
    relative: tuple[MeanInterval | None, ...]
    """NE relative to the first row's in percent, paired by seed, by milestone; None where a seed is missing."""
    paper_percent: float | None
    """The paper's value at its last milestone; None where the paper has no such row."""
    paper_flops: float | None
    seconds: float
    """Seconds of training and evaluation of all seeds."""
    errors: tuple[str, ...]
    """Errors of seeds that diverged."""

    @property
    def last_ne(self) -> tuple[float | None, ...]:
        """NE at the last milestone, by seed."""
        return tuple(curve[-1] for curve in self.ne)


class Comparison(Value):
    """One row's NE relative to another's, in percent, at the last milestone."""

    row: str
    against: str
    difference: MeanInterval | None
    verdict: Better
    """Whether the row is better: where the interval excludes zero."""


class Finding(Value):
    """A claim about the table's rows, and whether it holds here."""

    text: str
    in_paper: bool
    """Whether the paper makes the claim; False for what others ask about the paper."""
    holds: Better
    """Whether the claim holds: yes where all comparisons say so, no where one says the opposite."""
    comparisons: tuple[Comparison, ...]


class TableResult(Value):
    """A table of the paper on a log of one's own."""

    table: str
    title: str
    log: str
    """Fingerprint of the log."""
    train_rows: int
    validation_rows: int
    seeds: tuple[int, ...]
    confidence: float | None
    """Confidence of intervals; None with one seed, which has none."""
    milestones: tuple[int, ...]
    """Numbers of training examples seen."""
    rows: tuple[RowResult, ...]
    """Rows of the table; NE is relative to the first."""
    findings: tuple[Finding, ...]
    source: str = SOURCE
    """Source of the paper's values."""


def result_of(
    name: str,
    table: Table,
    config: TableConfig,
    jobs: Sequence[Sequence[Job]],
    records: Mapping[str, TrialRecord],
    rows: Mapping[str, int],
) -> TableResult:
    """The table from its finished trainings.

    Args:
        name: name of the table.
        table: rows and claims of the table.
        config: settings of the table.
        jobs: jobs of each row, by seed.
        records: records by the fingerprint of their job.
        rows: numbers of rows of the log, by split.

    Raises:
        UserError: where no training came as far as its first evaluation.
    """
    trained = [[records[job.fingerprint] for job in row_jobs] for row_jobs in jobs]
    milestones = sorted(
        {point.examples for records in trained for record in records for point in record.result.curve}
    )
    if not milestones:
        errors = sorted(
            {record.result.error for records in trained for record in records if record.result.error}
        )
        raise UserError(f"every training diverged before its first evaluation: {'; '.join(errors)}.")
    curves = [[_at(milestones, record) for record in records] for records in trained]
    results = tuple(
        _row(
            row,
            row_records,
            curve,
            [compared(*pair, config.level) for pair in _by_milestone(curve, curves[0])],
        )
        for row, row_records, curve in zip(table.rows, trained, curves, strict=True)
    )
    return TableResult(
        table=name,
        title=table.title,
        log=jobs[0][0].log,
        train_rows=config.training.rows_used(rows["train"]),
        validation_rows=rows["validation"],
        seeds=tuple(job.seed for job in jobs[0]),
        confidence=config.level if config.seeds > 1 else None,
        milestones=tuple(milestones),
        rows=results,
        findings=tuple(
            finding(claim, {row.name: row.last_ne for row in results}, config.level) for claim in table.claims
        ),
    )


def _row(
    row: Row, trained: Sequence[TrialRecord], curves: Sequence[Curve], relative: Sequence[MeanInterval | None]
) -> RowResult:
    return RowResult(
        name=row.name,
        flops=trained[0].job.flops or 0.0,
        parameters=trained[0].job.parameters or 0,
        ne=tuple(curves),
        relative=tuple(relative),
        paper_percent=row.paper_percent,
        paper_flops=row.paper_flops,
        seconds=sum(record.result.measured.whole_seconds for record in trained),
        errors=tuple(record.result.error for record in trained if record.result.error),
    )


def _by_milestone(curves: Sequence[Curve], others: Sequence[Curve]) -> Iterator[tuple[Curve, Curve]]:
    """NE by seed of one row and of another, milestone by milestone."""
    return zip(zip(*curves, strict=True), zip(*others, strict=True), strict=True)


def finding(claim: Claim, last_ne: Mapping[str, Sequence[float | None]], confidence: float) -> Finding:
    """Whether a claim holds, from the rows' NE by seed at the last milestone."""
    comparisons = []
    for row, against in claim.pairs:
        difference = compared(last_ne[row], last_ne[against], confidence)
        comparisons.append(
            Comparison(row=row, against=against, difference=difference, verdict=_better(difference))
        )
    verdicts = {comparison.verdict for comparison in comparisons}
    all_say_so = Better.YES if verdicts == {Better.YES} else Better.CANNOT_TELL
    holds = Better.NO if Better.NO in verdicts else all_say_so
    return Finding(text=claim.text, in_paper=claim.in_paper, holds=holds, comparisons=tuple(comparisons))


def _better(difference: MeanInterval | None) -> Better:
    if difference is None or difference.low is None or difference.high is None:
        return Better.CANNOT_TELL
    not_worse = Better.YES if difference.high < 0 else Better.CANNOT_TELL
    return Better.NO if difference.low > 0 else not_worse


def _at(milestones: Sequence[int], record: TrialRecord) -> Curve:
    """NE of a training at each milestone; None where it was not evaluated, or NE is not finite."""
    finite = {
        point.examples: point.validation.ne
        for point in record.result.curve
        if math.isfinite(point.validation.ne)
    }
    return tuple(finite.get(examples) for examples in milestones)
