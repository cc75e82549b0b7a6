"""An audit in words: for the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from dashboards.terminal.tables import plain_table
from dashboards.units import MISSING, decimals
from search.analysis.fidelity.result import FidelityResult, FractionResult
from search.analysis.statistics.rank_correlation import RankCorrelation

COLUMNS = ("Fraction", "Rows", "FLOPs", "Seconds", "Tau", "95 % interval", "Best third", "Regret")


def part_name(fraction: float) -> str:
    """A part of the log in words: `25 %`, or `whole log`."""
    return "whole log" if fraction == 1.0 else f"{100 * fraction:g} %"


def cells(result: FidelityResult) -> list[tuple[str, ...]]:
    """A line for each part of the log."""
    return [_cells(row) for row in result.fractions]


def table(result: FidelityResult) -> Table:
    """The table for the terminal."""
    return plain_table(COLUMNS, cells(result), COLUMNS[:1])


def remarks(result: FidelityResult) -> Iterator[str]:
    """Sentences on how to read the table."""
    yield (
        f"{len(result.candidates)} candidates of space {result.space}, NE on {result.validation_rows:,} "
        f"validation rows. A fraction is the last of {result.train_rows:,} training rows. Tau is Kendall's tau-b "
        f"between its ranking (seed {result.seed}) and the whole log's (seed {result.reference_seed}), with a "
        "bootstrap interval over candidates; the whole log's own row, between these two seeds, is the most that "
        "a fraction can be expected to reach. Best third: tau among the best by the whole log. Regret: NE, on "
        "the whole log, of the candidate that the fraction would choose, above the lowest. FLOPs and seconds are "
        "of all trainings in the row, relative to the whole log's."
    )


def verdict(result: FidelityResult) -> str:
    """Which fraction keeps the wanted tau, and what to set; or that none does."""
    wanted, whole = f"{result.wanted_tau:g}", result.whole.tau
    parts = [row for row in result.fractions if row.fraction < 1.0 and row.tau is not None]
    two_seeds = f"two seeds on the whole log agree with {_short(whole)}"
    if not parts:
        return f"{two_seeds[0].upper()}{two_seeds[1:]}: the most that a fraction can be expected to reach."
    if result.cheapest is None:
        best = max(parts, key=lambda row: row.tau.value if row.tau else 0.0, default=None)
        nearest = f" ({part_name(best.fraction)} comes nearest, {_short(best.tau)})" if best else ""
        reason = " Search on the whole log, or ask for less with --tau."
        if whole is not None and whole.value < result.wanted_tau:
            reason = (
                " No fraction can be expected to: the noise of one seed takes more on the whole log too. More "
                f"passes or rows make for less of it; --tau {_short(whole)} asks for what the whole log has."
            )
        return f"None of the fractions measured keeps a tau of {wanted}{nearest}; {two_seeds}.{reason}"
    row = next(row for row in result.fractions if row.fraction == result.cheapest)
    surely = (
        "no fraction's whole interval lies there"
        if result.cheapest_surely is None
        else f"with its whole interval there: {part_name(result.cheapest_surely)}"
    )
    return (
        f"The cheapest fraction with a tau of {wanted} or more is {part_name(row.fraction)} "
        f"({_short(row.tau)}), at {100 * row.flops_share:.0f} % of the FLOPs; {surely}; {two_seeds}. To search "
        "on it:"
    )


def key(result: FidelityResult) -> str | None:
    """The key of `run` for the cheapest fraction; None where there is none."""
    return f"training.train_fraction={result.cheapest:g}" if result.cheapest is not None else None


def markdown(result: FidelityResult) -> str:
    """Markdown of the table, how to read it, and what follows."""
    lines = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *cells(result)]
    shown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    end = f"\n\n`{key(result)}`" if key(result) else ""
    notes = "\n\n".join(remarks(result))
    return f"# Ranking on a part of the log\n\n{shown}\n\n{notes}\n\n{verdict(result)}{end}\n"


def _cells(row: FractionResult) -> tuple[str, ...]:
    return (
        part_name(row.fraction),
        f"{row.rows:,}",
        f"{100 * row.flops_share:.1f} %",
        f"{row.seconds:,.0f}" + (f" ({100 * row.seconds_share:.0f} %)" if row.seconds_share else ""),
        decimals(row.tau.value if row.tau else None, 2),
        f"{row.tau.low:.2f} to {row.tau.high:.2f}" if row.tau else MISSING,
        decimals(row.tau_of_best_third, 2),
        f"{row.regret_percent:.2f} %" if row.regret_percent is not None else MISSING,
    )


def _short(tau: RankCorrelation | None) -> str:
    return f"{tau.value:.2f}" if tau is not None else MISSING
