"""Example trials that were planned for a cluster: what fits, what lacks, what ran out of memory."""

from __future__ import annotations

from random import Random
from typing import Any

from records import judged, trial

from dhen.cost import CostRow
from trials.records.study_record import ClusterSummary, Comparison, StudyRecord, WinnerVerdict
from trials.records.trial_record import (
    Attempt,
    Outcome,
    PlanSummary,
    RejectedStrategy,
    TrialKind,
    TrialPlan,
    TrialRecord,
)

MIB = 2**20
HBM = 24 * MIB
CLUSTER = ClusterSummary(name="two-hosts", hosts=2, gpus_per_host=2, hbm=HBM, verified=False)
ITEMS = {"parameters": 4 * MIB, "activations": 13 * MIB, "embedding_shards": 2 * MIB, "reserve": 0}
ROW: dict[str, Any] = {"modules": [{"kind": "linear"}], "out_embeddings": 8, "shortcut": False}
ROW |= {"norm": "rms", "norm_placement": "pre"}
MODEL: dict[str, Any] = {
    "family": "dhen",
    "embedding_dim": 16,
    "layers": [
        {
            "modules": [{"kind": "attention", "heads": 2}, {"kind": "dlrm", "mlp": [64]}],
            "ensemble": {"kind": "concat"},
            "out_embeddings": 8,
        },
        *[ROW] * 2,
    ],
    "head": [64],
    "dropout": 0.1,
}
"""A layer of two modules (which puts out 16 embeddings), then two that differ in what reaches them."""


def cost() -> tuple[CostRow, ...]:
    """A cost table as models have it: ten tables, four of them buckets; a map to the shortcut of layer 0."""
    tables = [f"features.table.C{i}" for i in range(6)] + [f"features.table.I{i}__bucket" for i in range(4)]
    return (
        *(CostRow(name, "lookup", 0.0, 1000, 64.0) for name in tables),
        CostRow("features.numeric0", "matmul", 3000.0, 1500),
        CostRow("layer0.attention0.qkv", "matmul", 40_000.0, 800),
        CostRow("layer0.attention0.scores", "attention", 10_000.0),
        CostRow("layer0.attention0.softmax", "elementwise", 500.0),
        CostRow("layer0.dlrm1.mlp0", "matmul", 30_000.0, 2000),
        CostRow("layer0.shortcut", "matmul", 2.0 * 7 * 16 * 16, 112),
        CostRow("layer1.linear0", "matmul", 5000.0, 100),
        CostRow("head0", "matmul", 8000.0, 4000),
        CostRow("head1", "matmul", 128.0, 65),
    )


def plan(**changes: Any) -> PlanSummary:
    """A plan for `fsdp`, for which two techniques lack memory and one is slower."""
    rejected = (
        RejectedStrategy(strategy="dp", memory_bytes=40 * MIB, lacking_bytes=16 * MIB),
        RejectedStrategy(strategy="zero1", memory_bytes=30 * MIB, lacking_bytes=6 * MIB),
        RejectedStrategy(strategy="hsdp", memory_bytes=22 * MIB, lacking_bytes=0),
    )
    known: dict[str, Any] = {
        "strategy": "fsdp",
        "fits": True,
        "examples_per_rank": 512,
        "memory_bytes": ITEMS,
        "peak_at": "backward of layer0",
        "reason": "fsdp needs 19 MiB per rank of 24 MiB.",
        "rejected": rejected,
    }
    return PlanSummary(**known | changes)


def planned(number: int, *, out_of_memory: bool = False, points: int = 10) -> TrialRecord:
    """A candidate that was planned, and trained with `fsdp`; before it with `zero2`, which ran out of memory."""
    record = trial(number, Random(number), points=points)
    attempts = [
        Attempt(strategy="fsdp", executed="fsdp", outcome=Outcome.COMPLETED, predicted_bytes=19 * MIB)
    ]
    if out_of_memory:
        short = {"needed_bytes": 27 * MIB, "limit_bytes": HBM, "predicted_bytes": 23 * MIB}
        attempts.insert(0, Attempt(strategy="zero2", outcome=Outcome.OUT_OF_MEMORY, **short))
    summary = plan(ran_out=("zero2",) if out_of_memory else ())
    return (
        record.replace(
            attempts=tuple(attempts), plan=TrialPlan(technique="fsdp", peak_bytes=19 * MIB, summary=summary)
        )
        .with_job(model=MODEL, cost=cost(), flops=96_712.0 * (1 + number % 7))
        .with_result(technique="fsdp")
    )


def planned_study(candidates: int = 12, *, points: int = 10, **changes: Any) -> StudyRecord:
    """A finished study on a cluster of four ranks; the baseline was tuned once, the third trial climbed."""
    baseline = trial(0, Random(7), kind=TrialKind.BASELINE, points=points)
    trials = [baseline, *(planned(n, out_of_memory=n == 3, points=points) for n in range(1, candidates + 1))]
    return judged(trials, cluster=CLUSTER, **changes)


def confirmed(record: StudyRecord, better: WinnerVerdict = WinnerVerdict.YES) -> StudyRecord:
    """The same study, its best compared with the baseline."""
    low, point, high = {
        WinnerVerdict.YES: (-0.41, -0.3, -0.19),
        WinnerVerdict.NO: (0.1, 0.2, 0.3),
        WinnerVerdict.CANNOT_TELL: (-0.5, -0.1, 0.3),
    }[better]
    comparison = Comparison(
        trial=record.best,
        seeds=(1, 2, 3),
        blocks=200,
        blocked_by="time",
        ne=0.78,
        baseline_ne=0.7823,
        difference_percent=point,
        low_percent=low,
        high_percent=high,
        p=0.01,
        p_adjusted=0.01,
        winners=1,
        detectable_percent=0.12,
        better=better,
    )
    return record.replace(comparisons=(comparison,))
