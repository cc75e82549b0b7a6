"""Trials in brief, for who looks at thousands of them at once: what the database leaves out is neither sent nor
parsed.

A candidate that has ended comes without its point, its cost table and its curve, of which the last evaluation
stays: most of what a record holds, and nothing that a summary of the study shows. A plan that fits comes without
its items and its reasons; then most plans of a study are equal, and equal ones are parsed once.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from trials.record import Outcome, TrialKind
from trials.storage.schema import JOBS, PLANS, TRIALS

Columns = tuple[sa.ColumnElement[Any], sa.ColumnElement[Any], sa.ColumnElement[Any]]
"""The texts of a trial's record, of its job's summary and of a plan."""
WHOLE: Columns = (TRIALS.c.record, JOBS.c.summary, PLANS.c.plan)
OF_A_PLAN = ("memory_bytes", "step_seconds", "peak_at", "reason", "rejected", "faster", "notes")
"""Keys that a plan lacks in brief."""


def in_brief(dialect: str) -> Columns:
    """Returns the columns of `WHOLE` as JSON functions of a dialect shorten them."""
    record, summary, plan = (_on_sqlite if dialect == "sqlite" else _on_postgresql)()
    unfinished = [outcome.value for outcome in Outcome if outcome.unfinished]
    shortened = (TRIALS.c.kind == TrialKind.CANDIDATE.value) & TRIALS.c.outcome.not_in(unfinished)
    return (
        sa.case((shortened, record), else_=TRIALS.c.record),
        sa.case((shortened, summary), else_=JOBS.c.summary),
        sa.case((PLANS.c.fits, plan), else_=PLANS.c.plan),
    )


def _on_sqlite() -> Columns:
    last = sa.func.json_extract(TRIALS.c.record, "$.result.curve[#-1]")
    curve = sa.func.json(sa.func.coalesce(sa.literal("[") + last + "]", "[]"))
    record = sa.func.json_replace(TRIALS.c.record, "$.point", sa.func.json("{}"), "$.result.curve", curve)
    plan = sa.func.json_remove(PLANS.c.plan, *(f"$.{key}" for key in OF_A_PLAN))
    return record, sa.func.json_remove(JOBS.c.summary, "$.cost"), plan


def _on_postgresql() -> Columns:
    from sqlalchemy.dialects.postgresql import ARRAY, JSONB

    record, summary = sa.cast(TRIALS.c.record, JSONB), sa.cast(JOBS.c.summary, JSONB)
    last = sa.func.jsonb_path_query_array(record, sa.literal_column("'$.result.curve[last]'::jsonpath"))
    path = sa.cast(sa.literal(["result", "curve"], ARRAY(sa.Text)), ARRAY(sa.Text))
    shortened = sa.func.jsonb_set(record.op("-")(sa.literal("point", sa.Text)), path, last)
    plan = sa.cast(PLANS.c.plan, JSONB).op("-")(
        sa.cast(sa.literal([*OF_A_PLAN], ARRAY(sa.Text)), ARRAY(sa.Text))
    )
    without_cost = summary.op("-")(sa.literal("cost", sa.Text))
    return sa.cast(shortened, sa.Text), sa.cast(without_cost, sa.Text), sa.cast(plan, sa.Text)
