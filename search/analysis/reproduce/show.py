"""A trained table in words: for the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from dashboards.units import MISSING, si
from search.analysis.reproduce.result import Comparison, Finding, RowResult, TableResult
from trials.analyses import MeanInterval

FIXED = 4
"""Number of columns before the milestones."""
NOT_IN_PAPER = " (asked of the paper, not in it)"


def columns(result: TableResult) -> list[str]:
    """Titles: the row, its size, its NE, NE relative to the first row's by milestone, the paper's values."""
    milestones = [f"at {si(examples)}" for examples in result.milestones]
    return [
        "row",
        "FLOPs",
        "parameters",
        "NE",
        *milestones,
        "paper",
        *(["paper's FLOPs"] if _has_flops(result) else []),
    ]


def cells(result: TableResult) -> list[list[str]]:
    """A line for each row of the table, as its columns."""
    lines = []
    for row in result.rows:
        first = row is result.rows[0]
        relative = ["0" if first else shown(difference) for difference in row.relative]
        paper = "0" if first else f"{row.paper_percent:+.3f} %" if row.paper_percent is not None else ""
        flops = [si(row.paper_flops) if row.paper_flops else ""] if _has_flops(result) else []
        lines.append([row.name, si(row.flops), si(row.parameters), _ne(row), *relative, paper, *flops])
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
        yield f"{finding.holds}: {finding.text}{'' if finding.in_paper else NOT_IN_PAPER} {_detail(finding)}"


def findings_heading(result: TableResult) -> str:
    """The line above `findings`, which says what they are."""
    at = f"{result.milestones[-1]:,} examples"
    if result.confidence is None:
        return f"Whether the paper's findings hold on this log, at {at} (one seed cannot tell):"
    level = f"{100 * result.confidence:g} % interval, one comparison at a time"
    return f"Whether the paper's findings hold on this log, at {at} ('cannot tell': zero is in the {level}):"


def rich_table(result: TableResult, width: int) -> Table:
    """The table for a terminal of `width` columns; where that is narrow it has the last milestones, and a note."""
    lines = [columns(result), *cells(result)]
    widths = [2 + max(map(len, column)) for column in zip(*lines, strict=True)]
    left_out = 0
    while (
        sum(widths) - sum(widths[FIXED : FIXED + left_out]) > width and left_out < len(result.milestones) - 1
    ):
        left_out += 1
    table = Table(title=heading(result), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(_without(lines[0], left_out)):
        table.add_column(name, justify="right" if index else "left", no_wrap=bool(index))
    for line in lines[1:]:
        table.add_row(*map(Text, _without(line, left_out)))
    if left_out:
        table.caption = f"{left_out} milestones before these are in the files"
        table.caption_justify = "left"
    return table


def markdown(result: TableResult) -> str:
    """Markdown of the table, how to read it, and what it says."""
    titles = columns(result)
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *cells(result)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    listed = "\n".join(f"- {line}" for line in findings(result))
    notes = "\n\n".join(remarks(result))
    return f"# {heading(result)}\n\n{table}\n\n{notes}\n\n{findings_heading(result)}\n\n{listed}\n"


def _without(line: list[str], milestones: int) -> list[str]:
    return line[:FIXED] + line[FIXED + milestones :]


def _ne(row: RowResult) -> str:
    """Mean NE over seeds at the last milestone."""
    values = [ne for ne in row.last_ne if ne is not None]
    if len(values) < len(row.ne):
        return "diverged" if row.errors else MISSING
    return f"{sum(values) / len(values):.5f}"


def _has_flops(result: TableResult) -> bool:
    return any(row.paper_flops is not None for row in result.rows)


def _detail(finding: Finding) -> str:
    if len(finding.comparisons) == 1:
        return f"({shown(finding.comparisons[0].difference)})"
    return f"({'; '.join(map(_comparison, finding.comparisons))})"


def _comparison(comparison: Comparison) -> str:
    return f"{comparison.row} against {comparison.against} {shown(comparison.difference)}"
