"""Where the front sits on the edge of the space, by hand."""

from __future__ import annotations

from typing import Any

from records import changed, judged, study

from dashboards.edges import Edge, edges, on_the_edge, widened, widened_now
from dashboards.sentences.summary import sentences
from trials.records.findings import OrderedAxis, Setting
from trials.records.study_record import GrownAxis, StudyRecord
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

LENGTHS = OrderedAxis(name="embedding_dim", part="model", key="embedding_dim", values=(8, 16, 32))
RATES = OrderedAxis(
    name="training.learning_rate", part="training", key="learning_rate", low=0.001, high=0.1, log=True
)
WIDTHS = OrderedAxis(
    name="layer.dlrm.mlp", part="layer", key="mlp", layer=0, kind="dlrm", values=("64", "128-64")
)


def front_of(axis: OrderedAxis, *networks: dict[str, Any], **changes: Any) -> StudyRecord:
    """A study whose front has these networks, and whose other candidates do not count."""
    some = [trial for trial in study().trials if trial.kind is TrialKind.CANDIDATE]
    done = [trial for trial in some if trial.result.outcome is Outcome.COMPLETED]
    trials = [_network(trial, network) for trial, network in zip(done, networks, strict=False)]
    record = judged([*(trial for trial in study().trials if trial.kind is TrialKind.BASELINE), *done])
    numbers = tuple(trial.number for trial in trials)
    others = [trial for trial in record.trials if trial.number not in numbers]
    fields = {"axes": (axis,), "front": numbers, "best": numbers[-1], "knee": numbers[0]} | changes
    return record.replace(trials=tuple(sorted([*others, *trials], key=lambda trial: trial.number)), **fields)


def _network(trial: TrialRecord, values: dict[str, Any]) -> TrialRecord:
    model, rest = {**trial.job.model}, {**values}
    training = {**trial.job.training, **rest.pop("training", {})}
    tuned_from = rest.pop("tuned_from", None)
    return changed(trial, model=model | rest, training=training).with_origin(tuned_from=tuned_from)


def lengths(*values: int) -> list[dict[str, Any]]:
    return [{"embedding_dim": value} for value in values]


def test_the_end_of_a_choice_where_most_sit() -> None:
    record = front_of(LENGTHS, *lengths(32, 32, 8, 32, 32, 32))
    assert edges(record) == (Edge(axis="embedding_dim", highest=True, end=32, count=5, having=6),)
    said = (
        "The front's best sit on the edge of the space: embedding_dim at its highest, 32 (5 of 6). A wider axis "
        "may hold better ones: copy the space (`dhen-search spaces default`) and widen it."
    )
    assert on_the_edge(record) == said
    assert said in sentences(record)
    of_a_file = on_the_edge(record.replace(space_file="mine/wide.yaml"))
    assert of_a_file is not None
    assert "copy the space (mine/wide.yaml) and widen it" in of_a_file


def test_two_are_too_few_half_is_not_most_and_a_lower_end_counts_if_something_lies_below_it() -> None:
    assert edges(front_of(LENGTHS, *lengths(32, 32))) == ()
    assert edges(front_of(LENGTHS, *lengths(32, 32, 32, 16, 16, 16))) == ()
    assert on_the_edge(front_of(LENGTHS, *lengths(16, 16, 16))) is None
    assert [(edge.highest, edge.end) for edge in edges(front_of(LENGTHS, *lengths(8, 8, 8)))] == [(False, 8)]
    closed = LENGTHS.replace(open_below=False)
    assert edges(front_of(closed, *lengths(8, 8, 8))) == ()
    assert edges(front_of(LENGTHS.replace(open_above=False), *lengths(32, 32, 32))) == ()


def test_five_percent_of_a_range_on_its_own_scale() -> None:
    """A twentieth of two decades ends at 0.001 x 10^0.1 = 0.00126; on a linear scale it would end at 0.006."""

    def rates(*values: float) -> StudyRecord:
        return front_of(RATES, *({"training": {"learning_rate": value}} for value in values))

    assert [edge.count for edge in edges(rates(0.001, 0.00125, 0.0012, 0.002))] == [3]
    assert edges(rates(0.001, 0.0013, 0.0013, 0.0013)) == ()
    words = on_the_edge(rates(0.1, 0.09, 0.095, 0.001))
    assert words is not None
    assert "training.learning_rate at its highest, 0.1 (3 of 4)" in words


def test_only_networks_that_have_the_module_count() -> None:
    def dlrm(mlp: list[int]) -> dict[str, Any]:
        return {"layers": [{"modules": [{"kind": "linear"}, {"kind": "dlrm", "mlp": mlp}]}]}

    without = {"layers": [{"modules": [{"kind": "linear"}]}]}
    record = front_of(WIDTHS, dlrm([128, 64]), dlrm([128, 64]), dlrm([128, 64]), *[without] * 4)
    assert edges(record) == (Edge(axis="layer.dlrm.mlp", highest=True, end="128-64", count=3, having=3),)


def test_an_axis_of_the_tuning_stage_counts_where_it_was_tuned() -> None:
    decay = OrderedAxis(
        name="training.table_decay", part="training", key="table_decay", values=(0.1, 0.2), tuned_last=True
    )
    untuned = {"training": {"table_decay": 0.1}}
    assert edges(front_of(decay, *[untuned] * 4)) == ()
    assert edges(front_of(decay, *[untuned | {"tuned_from": 3}] * 3))[0].having == 3


def step(axis: str, before: Setting, end: Setting, **changes: Any) -> GrownAxis:
    facts: dict[str, Any] = {"highest": True, "count": 5, "having": 6, "completed": 12, "value": 1}
    return GrownAxis(axis=axis, before=before, end=end, **(facts | changes))


def test_a_study_that_widens_says_so_and_what_came_of_it() -> None:
    assert widened(front_of(LENGTHS, *lengths(32, 32, 8))) is None
    wider = LENGTHS.replace(values=(8, 16, 32, 64, 128))
    steps = (step("embedding_dim", 32, 64), step("embedding_dim", 64, 128))
    record = front_of(wider, *lengths(64, 128, 8, 32, 128), grown=steps)
    assert widened(record) == (
        "Axes of the space were widened where the best sat on their ends: embedding_dim up to 128 in place of 32. "
        "Of the front's 5 networks 3 lie beyond the ends before."
    )
    assert widened(record) in sentences(record)
    reused = record.replace(grown=(steps[0].replace(earlier="runs/a"), steps[1]))
    assert "(in part as in runs/a)" in (widened(reused) or "")
    assert widened_now(steps[0]) == (
        "the space is widened: embedding_dim goes up to 64 from now on, for 5 of 6 of the best networks are at "
        "its highest, 32"
    )
