"""The ladder of a trial: its rungs, and why each failed."""

from __future__ import annotations

import plotly.graph_objects as go
from records import bare, judged, study

from dashboards.figures.memory import MOST_RUNGS, ladder_figure, telling_trial
from trials.records.study_record import ClusterSummary, StudyRecord
from trials.records.trial_record import Attempt, Outcome, PlanSummary, RejectedStrategy, TrialRecord

MIB = 2**20
CLUSTER = ClusterSummary(name="this", hosts=2, gpus_per_host=2, hbm=6 * MIB, verified=True)
ITEMS = {
    "parameters": MIB,
    "gradients": MIB,
    "activations": 2 * MIB,
    "reserve": MIB // 2,
    "context": MIB // 2,
}


def rejected(strategy: str, lacking: int, *, whole: bool = True) -> RejectedStrategy:
    items = {"parameters": 3 * MIB, "optimizer_state": 3 * MIB + lacking} if whole else {}
    details = {"items": items, "reason": f"{strategy} needs more.", "step_seconds": 0.2} if whole else {}
    return RejectedStrategy(
        strategy=strategy, memory_bytes=6 * MIB + lacking, lacking_bytes=lacking, **details
    )


def plan(strategy: str, *others: RejectedStrategy, fits: bool = True) -> PlanSummary:
    return PlanSummary(
        strategy=strategy,
        fits=fits,
        examples_per_rank=8,
        memory_bytes=ITEMS,
        step_seconds={"forward": 0.1},
        reason=f"{strategy} needs 5 MiB.",
        rejected=others,
    )


def climbed(number: int = 7) -> TrialRecord:
    """Planned for zero1, out of memory, and then completed with fsdp."""
    first = plan("zero1", rejected("dp", 3 * MIB))
    last = plan("fsdp", rejected("dp", 3 * MIB), rejected("dp+micro_batches=2", MIB, whole=False))
    attempts = (
        Attempt(
            strategy="zero1",
            plan=first,
            outcome=Outcome.OUT_OF_MEMORY,
            predicted_bytes=5 * MIB,
            needed_bytes=7 * MIB,
            limit_bytes=6 * MIB,
        ),
        Attempt(
            strategy="fsdp",
            plan=last,
            outcome=Outcome.COMPLETED,
            predicted_bytes=5 * MIB,
            measured_bytes=5 * MIB + 1,
        ),
    )
    trial = bare(number, ne=0.78, flops=1e6).replace(attempts=attempts)
    return trial.with_plan(technique="fsdp", summary=last)


def with_ladder(*trials: TrialRecord) -> StudyRecord:
    return judged(list(trials)).replace(cluster=CLUSTER)


def verdicts(figure: go.Figure) -> list[str]:
    """The labels of the rungs, from top to bottom."""
    return [note.text for note in figure.layout.annotations if note.x == 0]


def test_rungs_say_why_each_cheaper_technique_failed() -> None:
    figure = ladder_figure(with_ladder(climbed()), 7)
    assert verdicts(figure) == [
        "dp: 9.0 MiB, lacks 3.0 MiB",
        "zero1: 5.0 MiB, ran out of memory, needed 7.0 MiB",
        "fsdp: 5.0 MiB, chosen, measured 5.0 MiB",
    ]
    assert {trace.name: trace.x[2] for trace in figure.data if trace.x[2]} == {
        "parameters": 1,
        "gradients": 1,
        "activations": 2,
        "all else": 1,
    }
    assert figure.data[0].hovertext[0].endswith("dp needs more.")
    assert "1 more, most with other numbers" in figure.layout.title.subtitle.text
    assert figure.layout.title.text.startswith("fsdp is the least that fits: 2 other ways")
    (line,) = figure.layout.shapes
    assert (line.x0, line.x1) == (6, 6)
    assert "memory of a rank 6.0 MiB" in [note.text for note in figure.layout.annotations]


def test_of_many_rungs_some_are_drawn() -> None:
    many = tuple(rejected(f"dp+micro_batches={2 + count}", MIB) for count in range(60))
    trial = bare(1, ne=0.78, flops=1e6).with_plan(technique="fsdp", summary=plan("fsdp", *many))
    figure = ladder_figure(with_ladder(trial), 1)
    assert len(verdicts(figure)) == MOST_RUNGS + 1
    assert f"{60 - MOST_RUNGS} more, most" in figure.layout.title.subtitle.text


def test_records_of_older_versions_have_totals_alone() -> None:
    old = plan(
        "fsdp",
        *(rejected(name, MIB * lacks, whole=False) for name, lacks in (("dp", 4), ("dp+micro_batches=4", 2))),
    )
    trial = bare(1, ne=0.78, flops=1e6).with_plan(technique="fsdp", summary=old)
    figure = ladder_figure(with_ladder(trial), 1)
    (trace,) = (trace for trace in figure.data if trace.name == "not itemised")
    assert (trace.y[0], trace.x[0]) == ("dp+micro_batches=4", 8)


def test_what_fits_and_was_not_chosen_is_slower() -> None:
    trial = bare(1, ne=0.78, flops=1e6).with_plan(
        technique="zero1", summary=plan("zero1", rejected("hsdp", 0))
    )
    figure = ladder_figure(with_ladder(trial), 1)
    assert verdicts(figure)[0].endswith("fits, its step takes 2.00x as long")
    assert figure.layout.title.text.startswith("zero1 is the fastest of those that fit")


def test_nothing_fits() -> None:
    summary = plan("fsdp", rejected("dp", MIB), fits=False)
    trial = bare(1, ne=0.78, flops=1e6).with_plan(technique=None, summary=summary)
    figure = ladder_figure(with_ladder(trial), 1)
    assert verdicts(figure)[-1].endswith("comes closest, nothing fits")
    assert figure.layout.title.text == "No memory technique fits this model"


def test_the_trial_that_tells_most_is_the_default() -> None:
    plain = bare(1, ne=0.77, flops=1e6).with_plan(summary=plan("dp"))
    record = with_ladder(plain, climbed(2))
    assert record.best == 1
    assert telling_trial(record) == 2
    assert telling_trial(with_ladder(plain)) == 1
    assert verdicts(ladder_figure(with_ladder(plain))) == ["dp: 5.0 MiB, chosen"]


def test_what_was_not_planned_says_so() -> None:
    assert "not planned" in ladder_figure(study()).layout.title.subtitle.text
    for figure in (ladder_figure(judged([])), ladder_figure(study(), 10_000)):
        assert figure.layout.title.subtitle.text.startswith("Shown as soon as")
