"""A table as trained: relative NE by milestone with intervals, and what it says of the paper's findings.

`TableResult` is the shape of `--json` and of the file beside the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dashboards.figures.curves import milestones_figure
from dashboards.figures.worth import judged
from dashboards.names import MISSING, si
from dashboards.report.page import write_figure
from dhen.atomic_write import write_atomically
from dhen.errors import UserError
from dhen.values import Value
from search.analysis.reproduce_tables import Claim, PaperTable, TableConfig, table_of
from search.analysis.statistics import compared
from search.analysis.views import markdown_table, trained
from search.execution.attempts import parallelism
from search.execution.train_list import TrainingList, measured_precision
from search.execution.trainer import Trainer
from search.session import open_session
from trials.records.findings import MeanInterval, WinnerVerdict
from trials.records.job import Job
from trials.records.trial_record import TrialRecord
from trials.runtime.launcher import Launcher

SOURCE = (
    "The paper's values (arXiv 2203.11014) were read from a secondary source; its log is not public, and "
    "larger by orders of magnitude."
)
Curve = tuple[float | None, ...]
"""NE by milestone, or by seed; None if a training did not get there."""


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
    """NE relative to the first row's in percent, paired by seed, by milestone; None if a seed is missing."""
    paper_percent: float | None
    """The paper's value at its last milestone; None if the paper has no such row."""
    paper_flops: float | None
    seconds: float
    """Seconds of training and evaluation of all seeds."""
    errors: tuple[str, ...]
    """Errors of seeds that diverged."""

    @property
    def last_ne(self) -> tuple[float | None, ...]:
        """NE at the last milestone, by seed."""
        return tuple(curve[-1] for curve in self.ne)


class RowComparison(Value):
    """One row's NE relative to another's, in percent, at the last milestone."""

    row: str
    against: str
    difference: MeanInterval | None
    verdict: WinnerVerdict
    """Whether the row is better: if the interval excludes zero."""


class Finding(Value):
    """A claim about the table's rows, and whether it holds here."""

    text: str
    in_paper: bool
    """Whether the paper makes the claim; False for what others ask about the paper."""
    holds: WinnerVerdict
    """Whether the claim holds: yes if all comparisons say so, no if one says the opposite."""
    comparisons: tuple[RowComparison, ...]


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
    table: PaperTable,
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
        UserError: if no training came as far as its first evaluation.
    """
    trained = [[records[job.fingerprint] for job in row_jobs] for row_jobs in jobs]
    every = [record for row_records in trained for record in row_records]
    milestones = sorted({point.examples for record in every for point in record.result.curve})
    if not milestones:
        errors = sorted({record.result.error for record in every if record.result.error})
        raise UserError(f"every training diverged before its first evaluation: {'; '.join(errors)}.")
    curves = [[_at(milestones, record) for record in row_records] for row_records in trained]
    results = tuple(
        RowResult(
            name=row.name,
            flops=row_records[0].job.flops or 0.0,
            parameters=row_records[0].job.parameters or 0,
            ne=tuple(row_curves),
            relative=tuple(
                compared(ne, first_ne, config.level)
                for ne, first_ne in zip(
                    zip(*row_curves, strict=True), zip(*curves[0], strict=True), strict=True
                )
            ),
            paper_percent=row.paper_percent,
            paper_flops=row.paper_flops,
            seconds=sum(record.result.measured.whole_seconds for record in row_records),
            errors=tuple(record.result.error for record in row_records if record.result.error),
        )
        for row, row_records, row_curves in zip(table.rows, trained, curves, strict=True)
    )
    last_ne = {row.name: row.last_ne for row in results}
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
        findings=tuple(finding(claim, last_ne, config.level) for claim in table.claims),
    )


def finding(claim: Claim, last_ne: Mapping[str, Sequence[float | None]], confidence: float) -> Finding:
    """Whether a claim holds, from the rows' NE by seed at the last milestone."""
    comparisons = []
    for row, against in claim.pairs:
        difference = compared(last_ne[row], last_ne[against], confidence)
        better = judged(difference.low, difference.high) if difference else WinnerVerdict.CANNOT_TELL
        comparisons.append(RowComparison(row=row, against=against, difference=difference, verdict=better))
    verdicts = {comparison.verdict for comparison in comparisons}
    all_say_so = WinnerVerdict.YES if verdicts == {WinnerVerdict.YES} else WinnerVerdict.CANNOT_TELL
    holds = WinnerVerdict.NO if WinnerVerdict.NO in verdicts else all_say_so
    return Finding(text=claim.text, in_paper=claim.in_paper, holds=holds, comparisons=tuple(comparisons))


def _at(milestones: Sequence[int], record: TrialRecord) -> Curve:
    """NE of a training at each milestone; None if it was not evaluated, or NE is not finite."""
    finite = {
        point.examples: point.validation.ne
        for point in record.result.curve
        if math.isfinite(point.validation.ne)
    }
    return tuple(finite.get(examples) for examples in milestones)


# A trained table in words: for the terminal, and as Markdown.

FIXED = 4
"""Number of columns before the milestones."""
NOT_IN_PAPER = " (asked of the paper, not in it)"


def lines_of(result: TableResult) -> list[list[str]]:
    """Titles, then a line for each row of the table: its size, its NE, NE relative to the first row's by
    milestone, the paper's values."""
    has_flops = any(row.paper_flops is not None for row in result.rows)
    milestones = [f"at {si(examples)}" for examples in result.milestones]
    titles = ["row", "FLOPs", "parameters", "NE", *milestones, "paper"]
    lines = [[*titles, *(["paper's FLOPs"] if has_flops else [])]]
    for row in result.rows:
        first, ne = row is result.rows[0], [ne for ne in row.last_ne if ne is not None]
        mean_ne = "diverged" if row.errors else MISSING
        if len(ne) == len(row.ne):
            mean_ne = f"{sum(ne) / len(ne):.5f}"
        relative = ["0" if first else shown(difference) for difference in row.relative]
        paper = "0" if first else f"{row.paper_percent:+.3f} %" if row.paper_percent is not None else ""
        flops = [si(row.paper_flops) if row.paper_flops else ""] if has_flops else []
        lines.append([row.name, si(row.flops), si(row.parameters), mean_ne, *relative, paper, *flops])
    return lines


def shown(estimate: MeanInterval | None) -> str:
    """A relative NE with its interval: `-1.044 ± 0.120 %`."""
    if estimate is None:
        return MISSING
    half = f" ± {estimate.half_width:.3f}" if estimate.half_width is not None else ""
    return f"{estimate.mean:+.3f}{half} %"


def heading(result: TableResult) -> str:
    """The line above the table, which says what it holds."""
    return f"The DHEN paper's {result.table.replace('table', 'table ')}: {result.title}"


def remarks(result: TableResult) -> Iterator[str]:
    """Sentences on how to read the table."""
    seeds = (
        f"seeds {result.seeds[0]} to {result.seeds[-1]}" if result.confidence else f"seed {result.seeds[0]}"
    )
    spread = (
        f", mean and {100 * result.confidence:g} % t-interval, paired by seed"
        if result.confidence
        else "; one seed gives no interval"
    )
    yield (
        f"NE on {result.validation_rows:,} validation rows, at training examples seen relative to the first "
        f"row's (negative is better), and as it is at the last; "
        f"{result.train_rows:,} training rows, {seeds}{spread}."
    )
    yield result.source
    for row in result.rows:
        for error in row.errors:
            yield f"{row.name}: {error}"


def findings(result: TableResult) -> Iterator[str]:
    """A line per finding: `yes: attention is better than DCN (-1.20 ± 0.31 %)`."""
    for finding in result.findings:
        details = [shown(comparison.difference) for comparison in finding.comparisons]
        if len(details) > 1:
            pairs = zip(finding.comparisons, details, strict=True)
            details = [f"{each.row} against {each.against} {detail}" for each, detail in pairs]
        asked = "" if finding.in_paper else NOT_IN_PAPER
        yield f"{finding.holds}: {finding.text}{asked} ({'; '.join(details)})"


def findings_heading(result: TableResult) -> str:
    """The line above `findings`, which says what they are."""
    at = f"{result.milestones[-1]:,} examples"
    if result.confidence is None:
        return f"Whether the paper's findings hold on this log, at {at} (one seed cannot tell):"
    level = f"{100 * result.confidence:g} % interval, one comparison at a time"
    return f"Whether the paper's findings hold on this log, at {at} ('cannot tell': zero is in the {level}):"


def rich_table(result: TableResult, width: int) -> Table:
    """The table for a terminal of `width` columns; if that is narrow it has the last milestones, and a note."""
    lines = lines_of(result)
    widths = [2 + max(map(len, column)) for column in zip(*lines, strict=True)]
    left_out = 0
    while sum(widths) > width and left_out < len(result.milestones) - 1:
        left_out += 1
        del widths[FIXED]
    titles, *rows = [line[:FIXED] + line[FIXED + left_out :] for line in lines]
    table = Table(title=heading(result), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(titles):
        table.add_column(name, justify="right" if index else "left", no_wrap=bool(index))
    for row in rows:
        table.add_row(*map(Text, row))
    if left_out:
        table.caption = f"{left_out} milestones before these are in the files"
        table.caption_justify = "left"
    return table


def markdown(result: TableResult) -> str:
    """Markdown of the table, how to read it, and what it says."""
    table, notes = markdown_table(lines_of(result)), "\n\n".join(remarks(result))
    listed = "\n".join(f"- {line}" for line in findings(result))
    return f"# {heading(result)}\n\n{table}\n\n{notes}\n\n{findings_heading(result)}\n\n{listed}\n"


# One session of `reproduce`: from the settings to the trained table and its files.


def reproduce(
    name: str, config: TableConfig, directory: Path, launcher: Launcher, console: Console
) -> TableResult:
    """Trains what the folder lacks of a table, and writes `NAME.json`, `NAME.md` and `NAME.html` there.

    Raises:
        UserError: for whatever is wrong with the settings, the log or the folder.
    """
    with open_session(directory, config, launcher, console) as session:
        log, rows = session.log, session.log.manifest.rows["train"]
        table = table_of(config, log.features)
        shares = parallelism(config.parallel, config.threads)
        precision = measured_precision(directory)
        trainer = Trainer(session.launcher, log, directory, threads=shares.threads, precision=precision)
        # the training of all rows, with an evaluation at each milestone
        training = config.training.resolved(rows, precision)
        examples = training.examples(rows)
        if config.training.evaluate_every is None:
            training = training.replace(evaluate_every=max(1, examples // config.milestones))
        assert training.batch_size is not None
        steps = examples // training.batch_size
        if steps < config.milestones:
            raise UserError(
                f"the log is too small: {training.rows_used(rows):,} training rows in batches of "
                f"{training.batch_size} are {steps} step(s), fewer than the {config.milestones} milestones; give "
                "a larger log, a smaller training.batch_size or fewer milestones."
            )
        seeds = range(config.seed, config.seed + config.seeds)
        jobs = [[trainer.job(row.model, training, seed) for seed in seeds] for row in table.rows]
        by_seed = [
            (f"{row.name}, seed {job.seed}", job)
            for seed_jobs in zip(*jobs, strict=True)
            for row, job in zip(table.rows, seed_jobs, strict=True)
        ]
        trainings = TrainingList(trainer, directory, side_by_side=shares.side_by_side)
        records = trained(trainings, by_seed, f"training {name}", console, rows)
        result = result_of(name, table, config, jobs, records, log.manifest.rows)
        write_atomically(directory / f"{name}.json", result.model_dump_json(indent=1))
        write_atomically(directory / f"{name}.md", markdown(result))
        first, *others = result.rows
        lines = {
            row.name: [
                (estimate.mean, estimate.half_width) if estimate else None for estimate in row.relative
            ]
            for row in others
        }
        figure = milestones_figure(lines, result.milestones, title=heading(result), reference=first.name)
        write_figure(figure, directory / f"{name}.html")
    return result
