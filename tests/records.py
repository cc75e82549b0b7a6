"""Example StudyRecords for tests: a study as the ledger would tell it, made up but consistent."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from dhen.cost import CostRow
from spaces.space import load_space
from trials.records.study_record import LogSummary, StudyRecord
from trials.records.trial_record import (
    CurvePoint,
    Measurements,
    Metrics,
    Outcome,
    TrialKind,
    TrialPlan,
    TrialRecord,
)

FLOOR = 0.7731
EVERY = 40_000
"""Examples between two evaluations."""
MODULES = ("attention", "cross", "dlrm", "linear", "conv")
NE_LIMIT = {TrialKind.BASELINE: 0.7905, TrialKind.CANDIDATE: 0.7925}
PARTS = ("origin", "job", "plan", "result")
ERRORS = {
    Outcome.INFEASIBLE: "needs 31.2 GiB per rank, 24.0 GiB are declared; no technique of the ladder fits",
    Outcome.OUT_OF_MEMORY: "out of memory at step 3 with every technique that was planned",
    Outcome.DIVERGED: "loss is NaN at step 112",
    Outcome.FAILED: 'rank 0 ended with exit code 1 at step 57: <unexpected> & "quoted"',
}


def study(candidates: int = 27, *, seed: int = 0, finished: bool = True, **changes: Any) -> StudyRecord:
    """Three trials of the baseline's tuning, then candidates of every outcome."""
    random = Random(seed)
    trials = [trial(number, random, kind=TrialKind.BASELINE) for number in range(3)]
    for number in range(3, 3 + candidates):
        outcome = random.choices(
            (Outcome.COMPLETED, Outcome.STOPPED, *ERRORS), weights=(70, 12, 6, 3, 4, 3), k=1
        )[0]
        trials.append(trial(number, random, kind=TrialKind.CANDIDATE, outcome=outcome))
    if candidates > 8:
        trials[-2] = (
            trials[5]
            .replace(number=trials[-2].number)
            .with_origin(reused_from=5, started_at=started(900))
            .with_result(seconds=0.1)
        )
    if not finished:
        last = trial(len(trials), random, kind=TrialKind.CANDIDATE)
        trials.append(last.with_result(outcome=Outcome.RUNNING, validation=None, seconds=None))
    return judged(trials, finished=finished, budget=candidates, **changes)


OUTCOMES_IN_TURN = (
    *([Outcome.COMPLETED] * 3),
    *(Outcome.STOPPED, Outcome.COMPLETED, Outcome.INFEASIBLE, Outcome.COMPLETED, Outcome.DIVERGED),
    *(Outcome.COMPLETED, Outcome.OUT_OF_MEMORY, Outcome.FAILED),
)


def spaced_study(candidates: int = 22, *, seed: int = 0, points: int = 10, **changes: Any) -> StudyRecord:
    """A baseline, then candidates at points of the default space, with every outcome in turn."""
    random, space = Random(seed), load_space("default")
    trials = [trial(0, random, kind=TrialKind.BASELINE)]
    for number in range(1, 1 + candidates):
        outcome = OUTCOMES_IN_TURN[(number - 1) % len(OUTCOMES_IN_TURN)]
        lacking = 0.3 if outcome in (Outcome.INFEASIBLE, Outcome.OUT_OF_MEMORY) else -0.4
        record = trial(number, random, outcome=outcome, points=points)
        record = record.replace(point=space.random_point(random))
        trials.append(record.with_plan(memory_excess=lacking, peak_bytes=3_000_000))
    return judged(trials, budget=candidates, **{"created_at": 1_795_000_000.0} | changes)


def with_result(study: StudyRecord, number: int, **result: Any) -> StudyRecord:
    """The study with another result of one trial."""
    trials = (each.with_result(**result) if each.number == number else each for each in study.trials)
    return study.replace(trials=tuple(trials))


def judged(
    trials: list[TrialRecord], *, finished: bool = True, budget: int = 30, **changes: Any
) -> StudyRecord:
    """The record of these trials, with baseline, front, best and knee as a driver would say them."""
    done = [
        trial for trial in trials if trial.result.validation and trial.result.outcome is Outcome.COMPLETED
    ]
    tuned = [trial for trial in done if trial.kind is TrialKind.BASELINE]
    field = [trial for trial in done if trial.kind is TrialKind.CANDIDATE]
    front: list[TrialRecord] = []
    for each in sorted(field, key=lambda trial: (trial.job.flops, trial.result.validation.ne)):
        if not front or each.result.validation.ne < front[-1].result.validation.ne:
            front.append(each)
    winners = {front[-1].number, *(trial.number for trial in tuned)} if front and finished else set()
    fields: dict[str, Any] = {
        "name": "ads-march",
        "directory": "runs/ads-march",
        "space": "default",
        "sampler": "tpe",
        "seed": 0,
        "log": LogSummary(
            name="ads.csv",
            fingerprint="0123456789abcdef",
            rows={"train": 400_000, "validation": 50_000, "test": 50_000},
            base_rate={"train": 0.0312, "validation": 0.0307, "test": 0.0309},
            tables=12,
            numeric=7,
            ne_floor={"validation": FLOOR, "test": FLOOR + 0.001},
        ),
        "trials": tuple(_tested(trial) if trial.number in winners else trial for trial in trials),
        "baseline": min(tuned, key=lambda trial: trial.result.validation.ne).number if tuned else None,
        "front": tuple(trial.number for trial in front),
        "best": front[-1].number if front else None,
        "knee": front[len(front) // 2].number if front else None,
        "finished": finished,
        "trials_budget": budget,
        "elapsed_seconds": sum(trial.result.seconds or 0 for trial in trials),
    }
    return StudyRecord(**fields | changes)


def trial(
    number: int,
    random: Random,
    *,
    kind: TrialKind = TrialKind.CANDIDATE,
    outcome: Outcome = Outcome.COMPLETED,
    points: int = 10,
) -> TrialRecord:
    """One trial; larger models are better, less so the larger they are."""
    flops = 10 ** random.uniform(5.0, 7.3) if kind is TrialKind.CANDIDATE else 1.4e6
    gain = 0.0042 * (math.log10(flops) - 5) + random.gauss(0, 0.0016)
    limit = NE_LIMIT[kind] - (gain if kind is TrialKind.CANDIDATE else random.uniform(0, 0.002))
    seen = {Outcome.STOPPED: 3, Outcome.DIVERGED: 1, Outcome.COMPLETED: points}.get(outcome, 0)
    curve = tuple(_point(step, limit, random) for step in range(1, seen + 1))
    has_result = outcome in (Outcome.COMPLETED, Outcome.STOPPED)
    train_seconds = seen * (2 + flops / 2e6)
    record = TrialRecord(
        number=number,
        kind=kind,
        point={
            "layers": 2,
            "layer0.block1": random.choice(MODULES),
            "learning_rate": random.uniform(1e-4, 1e-2),
        },
        attempts=(),
    )
    return changed(
        record,
        outcome=outcome,
        fingerprint=f"{random.getrandbits(64):016x}",
        model=_model(kind, random),
        training={"batch_size": 2048, "learning_rate": 0.001, "epochs": 1, "precision": "fp32"},
        cost=_cost(flops),
        flops=flops,
        parameters=int(flops * 0.6),
        embedding_parameters=2_400_000,
        curve=curve,
        validation=min((point.validation for point in curve), key=lambda m: m.ne) if has_result else None,
        measured=Measurements(
            examples_per_second=5e10 / flops if has_result else None,
            step_ms=flops / 3e5 if has_result else None,
            peak_memory_bytes=int(3e8 + flops * 40) if has_result else None,
            train_seconds=train_seconds or None,
            evaluate_seconds=seen * 0.7 or None,
        ),
        seconds=train_seconds + seen * 0.7 + 0.6,
        error=ERRORS.get(outcome),
        started_at=started(number),
        plan=TrialPlan(technique="dp" if outcome is not Outcome.INFEASIBLE else None),
    ).with_result(technique=random.choice(("dp", "dp", "zero1")) if seen else None)


def started(minute: int) -> str:
    """ISO 8601, this many minutes into the study."""
    return f"2026-03-{1 + minute // 1440:02d}T{minute // 60 % 24:02d}:{minute % 60:02d}:00+00:00"


def metrics(ne: float, *, examples: int = 50_000) -> Metrics:
    """Quality that goes with this NE."""
    return Metrics(ne=ne, log_loss=ne * 0.1375, auc=1.37 - 0.75 * ne, calibration=1.003, examples=examples)


def _point(step: int, limit: float, random: Random) -> CurvePoint:
    ne = limit + 0.02 * math.exp(-step / 2.5) + random.gauss(0, 0.0002)
    return CurvePoint(
        examples=step * EVERY,
        epoch=step / 10,
        train_loss=ne * 0.139,
        learning_rate=0.001,
        seconds=step * 3.1,
        validation=metrics(ne),
    )


def _tested(trial: TrialRecord) -> TrialRecord:
    return trial.with_result(test=metrics(trial.result.validation.ne + 0.0011))


def _model(kind: TrialKind, random: Random) -> dict[str, Any]:
    if kind is TrialKind.BASELINE:
        return {"family": "advanced_dlrm", "embedding_dim": 16, "mlp": [256, 128], "experts": 1}
    kinds = sorted(random.sample(MODULES, random.randint(1, 3)))
    layer = {
        "modules": [{"kind": kind} for kind in kinds],
        "ensemble": {"kind": random.choice(("concat", "sum"))},
        "out_embeddings": 8,
    }
    return {
        "family": "dhen",
        "embedding_dim": random.choice((8, 16, 32)),
        "layers": [layer] * random.randint(1, 4),
    }


def _cost(flops: float) -> tuple[CostRow, ...]:
    shares = {"features.mlp": 0.1, "layer0.attention": 0.45, "layer0.dlrm": 0.25, "head": 0.2}
    rows = [
        CostRow(
            name=name,
            kind="attention" if "attention" in name else "matmul",
            flops=flops * share,
            parameters=int(flops * share * 0.6),
        )
        for name, share in shares.items()
    ]
    tables = CostRow(name="features.tables", kind="lookup", flops=0.0, parameters=2_400_000, bytes=768.0)
    return (*rows, tables)


def bare(number: int, *, ne: float, flops: float, **facts: Any) -> TrialRecord:
    """A completed candidate of which nothing but its NE and its FLOPs is known, and these facts."""
    record = TrialRecord(number=number, kind=TrialKind.CANDIDATE)
    quality = Metrics(ne=ne, log_loss=ne, auc=0.7, calibration=1.0, examples=10)
    known: dict[str, Any] = {
        "outcome": Outcome.COMPLETED,
        "fingerprint": str(number),
        "flops": flops,
        "validation": quality,
    }
    return changed(record, **(known | facts))


def changed(record: TrialRecord, **facts: Any) -> TrialRecord:
    """The record with each fact where it belongs: in the trial itself, its origin, its job, its plan or its
    result."""
    for name, value in facts.items():
        part = next((part for part in PARTS if name in type(getattr(record, part)).model_fields), None)
        if name in TrialRecord.model_fields or part is None:
            record = record.replace(**{name: value})
        else:
            record = record.replace(**{part: getattr(record, part).replace(**{name: value})})
    return record
