"""The columns of a log as a table: the role of each, the reason, an example; by role if there are many."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from dashboards.units import decimals
from dhen.errors import listed
from trials.study_record import ColumnFinding

MOST_ROWS = 30
"""Number of columns up to which each has a row."""
NAMED = 6
"""Number of columns of a role that are named."""
EXPLANATION = (
    "`columns.NAME=ROLE` gives a column another role: categorical, numeric, multi_hot, timestamp, weight, "
    "ignore"
)
_COLUMNS = ("Column", "Role", "Why", "Distinct", "Missing", "Example")
_ROLES = ("Role", "Columns", "Why most of them", "Names")


def headings(findings: Sequence[ColumnFinding]) -> tuple[str, ...]:
    """Returns the headings of the table."""
    return _COLUMNS if len(findings) <= MOST_ROWS else _ROLES


def left_aligned(findings: Sequence[ColumnFinding]) -> tuple[str, ...]:
    """Returns the headings of columns of text."""
    return tuple(name for name in headings(findings) if name not in ("Distinct", "Missing", "Columns"))


def rows(findings: Sequence[ColumnFinding]) -> list[tuple[str, ...]]:
    """Returns the table's rows: one for each column of the log, or one for each role if there are many columns."""
    if len(findings) <= MOST_ROWS:
        return [
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
    by_role = defaultdict[str, list[ColumnFinding]](list)
    for each in findings:
        by_role[each.role].append(each)
    return [
        (
            role,
            f"{len(group):,}",
            Counter(each.why for each in group).most_common(1)[0][0],
            listed([each.name for each in group], NAMED),
        )
        for role, group in by_role.items()
    ]
