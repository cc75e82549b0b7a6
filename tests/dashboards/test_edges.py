"""Where the front sits on the edge of the space, by hand."""

from __future__ import annotations

from typing import Any

from records import changed, judged, study

from dashboards.edges import Edge, edges, on_the_edge, widened, widened_now
from dashboards.sentences.summary import sentences
from trials.ordered_axis import OrderedAxis, Setting
from trials.record import Outcome, TrialKind, TrialRecord
from trials.study_record import GrownAxis, StudyRecord

LENGTHS = OrderedAxis(name="embedding_dim", part="model", key="embedding_dim", values=(8, 16, 32))
RATES = OrderedAxis(
    name="training.learning_rate", part="training", key="learning_rate", low=0.001, high=0.1, log=True
)
WIDTHS = OrderedAxis(
    name="layer.dlrm.mlp", part="layer", key="mlp", layer=0, kind="dlrm", values=("64", "128-64")
)
DEPTHS = OrderedAxis(name="depth", part="depth", key="depth", values=(1, 2), open_below=False)


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


def test_two_are_too_few_and_half_is_not_most() -> None:
    assert edges(front_of(LENGTHS, *lengths(32, 32))) == ()
    assert edges(front_of(LENGTHS, *lengths(32, 32, 32, 16, 16, 16))) == ()
    assert on_the_edge(front_of(LENGTHS, *lengths(16, 16, 16))) is None


def test_a_lower_end_counts_unless_nothing_lies_below_it() -> None:
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


def test_a_layer_that_a_network_lacks_and_the_depth() -> None:
    one, two = (
        {"layers": [{"modules": [{"kind": "linear"}], "out_embeddings": 4}] * depth} for depth in (1, 2)
    )
    out = OrderedAxis(
        name="layer1.out_embeddings", part="layer", key="out_embeddings", layer=1, values=(2, 4)
    )
    assert edges(front_of(out, one, one, two, two)) == ()
    assert edges(front_of(out, one, one, two, two, two))[0].having == 3
    assert edges(front_of(DEPTHS, one, one, one)) == ()
    assert edges(front_of(DEPTHS, two, two, two))[0].end == 2


def test_an_axis_of_the_tuning_stage_counts_where_it_was_tuned() -> None:
    decay = OrderedAxis(
        name="training.table_decay", part="training", key="table_decay", values=(0.1, 0.2), tuned_last=True
    )
    untuned = {"training": {"table_decay": 0.1}}
    assert edges(front_of(decay, *[untuned] * 4)) == ()
    assert edges(front_of(decay, *[untuned | {"tuned_from": 3}] * 3))[0].having == 3


def test_many_edges_are_named_from_the_clearest_and_counted() -> None:
    record = front_of(LENGTHS, *lengths(8, 32, 32, 32))
    deep = record.replace(axes=(LENGTHS, *[LENGTHS.replace(name=f"x{n}", values=(32, 64)) for n in range(6)]))
    assert [edge.axis for edge in edges(deep)][:2] == ["x0", "x1"]
    words = on_the_edge(deep)
    assert words is not None
    assert "x0 at its lowest, 32 (3 of 3), " in words
    assert "and 2 more. Wider axes may hold" in words


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


def test_lower_ends_and_ranges_are_counted_as_widened() -> None:
    rates = RATES.replace(low=0.0001)
    networks = [{"training": {"learning_rate": rate}} for rate in (0.0005, 0.002, 0.0002)]
    lower = step("training.learning_rate", 0.001, 0.0001, highest=False)
    said = widened(front_of(rates, *networks, grown=(lower,)))
    assert said is not None
    assert "training.learning_rate down to 0.0001 in place of 0.001. Of the front's 3 networks 2 lie" in said


def test_an_edge_of_a_study_that_grows_asks_for_more_candidates() -> None:
    said = on_the_edge(front_of(LENGTHS, *lengths(32, 32, 8, 32, 32, 32), grows=True))
    assert said is not None
    assert "with more candidates (trials=, minutes=) the study may widen it by itself" in said
    assert said.endswith("or copy the space (`dhen-search spaces default`) and widen it.")
