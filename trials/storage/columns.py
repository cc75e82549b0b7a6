"""A trial in columns: what a summary shows of it stands apart from what only a close look needs, so that who looks
at thousands of trials at once reads less. What is not read is neither sent nor parsed, and no database has to cut
JSON.

In brief, every trial comes without its point and its job's cost table, and a candidate without its curve, of which
the last evaluation stays. A plan that fits comes without its items and its reasons; then most plans of a study are
equal, and equal ones are parsed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from pydantic_core import from_json, to_json

from trials.record import Attempt, JobSummary, PlanSummary, TrialKind, TrialRecord
from trials.storage.schema import JOBS, PLANS, TRIALS

Columns = tuple[sa.ColumnElement[Any], ...]
"""Columns of a trial, its job and its plan, in the order of `WHOLE`."""
WHOLE: Columns = (
    *(TRIALS.c.record, TRIALS.c.point, TRIALS.c.curve),
    *(JOBS.c.summary, JOBS.c.cost),
    *(PLANS.c.plan, PLANS.c.details),
)
BRIEF: Columns = (
    *(TRIALS.c.record, sa.null(), sa.case((TRIALS.c.kind != TrialKind.CANDIDATE.value, TRIALS.c.curve))),
    *(JOBS.c.summary, sa.null()),
    *(PLANS.c.plan, sa.case((sa.not_(PLANS.c.fits), PLANS.c.details))),
)
IN_TABLES: Any = {"job": True, "attempts": True, "plan": {"summary"}}
"""Parts of a record that have tables of their own."""
DETAILS = {"memory_bytes", "step_seconds", "peak_at", "reason", "rejected", "other_shapes", "faster", "notes"}
"""Keys of a plan that stand in its column `details`."""


def trial_columns(record: TrialRecord) -> dict[str, str]:
    """Returns a trial's columns `record`, `point` and `curve`."""
    *earlier, last = record.result.curve or (None,)
    in_short = record.with_result(curve=(last,)) if earlier else record
    return {
        "record": in_short.model_dump_json(exclude=IN_TABLES | {"point": True}),
        "point": _json(record.point),
        "curve": _json(earlier),
    }


def job_columns(job: JobSummary) -> dict[str, str]:
    """Returns a job's columns `summary` and `cost`."""
    return {"summary": job.model_dump_json(exclude={"cost"}), "cost": _json(job.cost)}


def plan_columns(plan: PlanSummary) -> dict[str, str]:
    """Returns a plan's columns `plan` and `details`."""
    return {"plan": plan.model_dump_json(exclude=DETAILS), "details": plan.model_dump_json(include=DETAILS)}


def read_record(
    record: str,
    point: str | None,
    curve: str | None,
    *,
    job: dict[str, Any] | None,
    plan: PlanSummary | None,
    attempts: tuple[Attempt, ...],
) -> TrialRecord:
    """Returns a trial put together again of its columns and of what stands in other tables."""
    data = from_json(record) | {"attempts": attempts}
    if point is not None:
        data["point"] = from_json(point)
    if curve is not None:
        data["result"]["curve"] = from_json(curve) + data["result"]["curve"]
    if job is not None:
        data["job"] = job
    if plan is not None:
        data["plan"]["summary"] = plan
    return TrialRecord.model_validate(data)


def read_job(summary: str, cost: str | None) -> dict[str, Any]:
    """Returns the data of a `JobSummary`."""
    data: dict[str, Any] = from_json(summary)
    return data if cost is None else data | {"cost": from_json(cost)}


def read_plans(columns: Mapping[str, tuple[str, str | None]]) -> dict[str, PlanSummary]:
    """Returns plans of their columns `plan` and `details`, by id; equal ones are parsed once."""
    plans = {
        each: PlanSummary.model_validate(from_json(plan) | (from_json(details) if details else {}))
        for each in set(columns.values())
        for plan, details in (each,)
    }
    return {identity: plans[each] for identity, each in columns.items()}


def _json(value: Any) -> str:
    return to_json(value).decode()
