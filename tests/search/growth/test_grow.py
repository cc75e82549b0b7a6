"""Studies whose best sit on the edge of their space, on fake processes: the space follows them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_processes import PLANNED_ELSEWHERE, FakeLauncher, FakeRun, evaluated, quality, scored

from dashboards.sentences.summary import sentences
from search.analysis.fidelity import AuditedStudy, taken
from search.config import read_study_config
from search.execution import growth
from search.execution.growth import EVERY, FIRST_LOOK, MOST_STEPS
from search.read_study import read_study
from search.samplers import SAMPLERS
from search.study import open_study as opening
from search.study_state import StudyState
from trials.data.prepared_log import PreparedLog
from trials.records.events import TrainingEvent
from trials.records.study_record import GrownAxis, StudyRecord
from trials.records.task import Task
from trials.records.trial_record import Measurements

pytestmark = pytest.mark.usefixtures("unsynced")
LENGTHS = """
modules: {linear: {}, mlp: {mlp: [[8], [16]]}}
slots: 2
depth: [1, 2, 3]
out_embeddings: 2
raw_numeric: false
ensemble: sum
model: {embedding_dim: [4, 8], head: [[8]]}
training: {learning_rate: {low: 0.001, high: 0.01, log: true}, table_decay: [0.0, 0.001]}
tuning: [training.table_decay]
"""
LENGTHS_ALONE = """
modules: {linear: {}}
slots: 1
depth: 1
out_embeddings: 2
raw_numeric: false
ensemble: sum
model: {embedding_dim: [4, 8], head: [[8]]}
training: {learning_rate: {low: 0.001, high: 0.01, log: true}}
"""
WORDS = ("baseline_trials=1", "training.epochs=6", *PLANNED_ELSEWHERE)


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("space") / "lengths.yaml"
    file.write_text(LENGTHS)
    return f"space={file}"


@pytest.fixture(scope="module")
def lengths_alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("space") / "lengths-alone.yaml"
    file.write_text(LENGTHS_ALONE)
    return f"space={file}"


def longer_is_better(task: Task, seconds: float = 1.0) -> FakeRun:
    """NE falls with the embeddings' length, and a little with two layers and a rate in the middle."""
    if task.score_split is not None:
        return FakeRun([scored(task.score_split)])
    model, rate = task.job.model, task.job.training.learning_rate
    layers = len(getattr(model, "layers", (1, 1)))
    ne = 0.9 - model.embedding_dim / 1000 + abs(layers - 2) / 10_000 + abs(rate - 0.004) / 100
    return FakeRun([TrainingEvent(best=quality(ne), measured=Measurements(train_seconds=seconds))])


Watcher = Callable[[StudyState], None]


def run(
    out: Path,
    log: PreparedLog,
    *words: str,
    script: Callable[[Task], FakeRun] = longer_is_better,
    watcher: Watcher = lambda state: None,
) -> StudyRecord:
    out.mkdir(exist_ok=True)
    config = read_study_config(None, [*WORDS, *words])
    return opening.open_study(config, out, log, FakeLauncher(script), [watcher]).run()


def lengths(record: StudyRecord) -> list[int]:
    return [trial.job.model["embedding_dim"] for trial in record.candidates]


def of_lengths(record: StudyRecord) -> list[GrownAxis]:
    return [step for step in record.grown if step.axis == "embedding_dim"]


def written(out: Path) -> Path:
    """The run directory, with the settings that readers look for."""
    (out / "study.yaml").write_text(f"name: {out.name}\n")
    return out


class Grown(NamedTuple):
    """A finished study of twenty candidates, and what it said."""

    folder: Path
    record: StudyRecord
    said: list[str]


GrownBy = Callable[[str], Grown]


@pytest.fixture(scope="module")
def grown(log: PreparedLog, space: str, tmp_path_factory: pytest.TempPathFactory) -> GrownBy:
    """The study by a sampler, made once."""

    @cache
    def by(sampler: str) -> Grown:
        folder, said = tmp_path_factory.mktemp(sampler) / "study", list[str]()

        def watcher(state: StudyState) -> None:
            said.extend(state.notices[len(said) :])

        record = run(folder, log, space, "trials=20", f"sampler={sampler}", watcher=watcher)
        return Grown(written(folder), record, said)

    return by


@pytest.fixture(scope="module")
def free(log: PreparedLog, lengths_alone: str, tmp_path_factory: pytest.TempPathFactory) -> StudyRecord:
    """A study that offers longer embeddings, since nothing speaks against them."""
    folder = tmp_path_factory.mktemp("free") / "study"
    record = run(folder, log, lengths_alone, "trials=14", "sampler=random")
    assert of_lengths(record)
    return record


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_the_axis_at_whose_end_the_best_sit_goes_on_and_is_tried_next(grown: GrownBy, sampler: str) -> None:
    _, record, said = grown(sampler)
    (step, *_) = of_lengths(record)
    assert (step.highest, step.before, step.end) == (True, 8, 16)
    assert step.completed % EVERY == 0
    assert step.completed >= FIRST_LOOK
    assert step.count >= 3
    first = next(trial for trial in record.candidates if trial.point == step.first)
    assert first.job.model["embedding_dim"] == 16
    earlier = [trial.point for trial in record.candidates if trial.number < first.number]
    assert step.first | {"embedding_dim": 8} in earlier
    assert max(lengths(record)[: first.number - 1]) == 8
    axis = next(axis for axis in record.axes if axis.name == "embedding_dim")
    assert axis.values == (4, 8, *(held.end for held in of_lengths(record)))
    sentence = (
        f"the space is widened: embedding_dim goes up to 16 from now on, for {step.count} of {step.having} of the "
        "best networks are at its highest, 8"
    )
    assert sentence in said
    summary = next(line for line in sentences(record) if line.startswith("Axes of the space were widened"))
    assert "embedding_dim up to 16 in place of 8" in summary


@pytest.mark.parametrize(
    ("sampler", "moment"),
    [
        *((sampler, "the step") for sampler in sorted(SAMPLERS)),
        ("nsga2", "its first candidate"),
        ("tpe", "later"),
    ],
)
def test_a_study_that_is_gone_on_with_comes_to_what_it_would_have_come_to(
    tmp_path: Path, log: PreparedLog, space: str, grown: GrownBy, sampler: str, moment: str
) -> None:
    words = (space, "trials=20", f"sampler={sampler}")
    undisturbed = grown(sampler).record

    def interrupt(state: StudyState) -> None:
        lengths = [trial.job.model["embedding_dim"] for trial in state.candidates]
        over = {"the step": bool(state.head.grown), "its first candidate": 16 in lengths}
        if over.get(moment, len(lengths) > 17):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "study", log, *words, watcher=interrupt)
    record = run(tmp_path / "study", log, *words)
    assert record.grown == undisturbed.grown
    assert of_lengths(record)
    assert record.axes == undisturbed.axes
    assert [trial.point for trial in record.candidates] == [trial.point for trial in undisturbed.candidates]
    assert record.front == undisturbed.front


def test_grow_no_keeps_the_space(tmp_path: Path, log: PreparedLog, space: str) -> None:
    record = run(tmp_path / "study", log, space, "trials=20", "sampler=random", "grow=no")
    assert record.grown == ()
    assert max(lengths(record)) == 8


def test_growing_can_be_ended_and_the_space_stays_as_it_is(
    tmp_path: Path, log: PreparedLog, space: str
) -> None:
    words = (space, "sampler=random")
    before = run(tmp_path / "study", log, *words, "trials=14")
    assert before.grown
    record = run(tmp_path / "study", log, *words, "trials=40", "grow=no")
    assert record.grown == before.grown
    assert sum(length == 16 for length in lengths(record)) > 5


def test_an_end_goes_on_by_a_few_steps_alone(tmp_path: Path, log: PreparedLog, space: str) -> None:
    record = run(tmp_path / "study", log, space, "trials=60", "sampler=random")
    assert [step.end for step in of_lengths(record)] == [16, 32, 64]
    assert len(of_lengths(record)) == MOST_STEPS
    assert record.best is not None
    assert record.trial(record.best).job.model["embedding_dim"] == 64


def test_what_does_not_fit_is_not_offered(tmp_path: Path, log: PreparedLog, lengths_alone: str) -> None:
    # a batch of one example cannot be cut into micro-batches
    words = (lengths_alone, "trials=14", "sampler=random", "technique=dp", "training.batch_size=1")
    free = run(tmp_path / "free", log, *words)
    peaks = {trial.job.model["embedding_dim"]: trial.plan.peak_bytes or 0 for trial in free.candidates}
    tight = run(tmp_path / "tight", log, *words, f"hbm={(peaks[8] + peaks[16]) // 2}")
    assert of_lengths(free)
    assert of_lengths(tight) == []
    assert max(lengths(tight)) == 8


def test_what_serving_refuses_is_not_offered(
    tmp_path: Path, log: PreparedLog, lengths_alone: str, free: StudyRecord
) -> None:
    sizes = {trial.job.model["embedding_dim"]: trial.job.weights_bytes or 0 for trial in free.candidates}
    words = (lengths_alone, "trials=14", "sampler=random", f"serving.max_bytes={sizes[8]}")
    assert of_lengths(run(tmp_path / "limited", log, *words)) == []


def test_what_has_too_large_tables_is_not_offered(
    tmp_path: Path, log: PreparedLog, lengths_alone: str, free: StudyRecord
) -> None:
    words = (lengths_alone, "trials=14", "sampler=random")
    sizes = {trial.job.model["embedding_dim"]: trial.job.table_bytes or 0 for trial in free.candidates}
    assert of_lengths(run(tmp_path / "limited", log, *words, f"max_table_bytes={sizes[16] - 1}")) == []
    assert of_lengths(run(tmp_path / "wide", log, *words, f"max_table_bytes={sizes[16]}"))


def test_what_would_take_too_much_of_the_time_left_is_not_offered(
    tmp_path: Path, log: PreparedLog, lengths_alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(task: Task) -> FakeRun:
        return longer_is_better(task, seconds=100.0)

    words = (lengths_alone, "trials=14", "sampler=random")
    assert of_lengths(run(tmp_path / "short", log, *words, "minutes=10", script=slow)) == []
    assert of_lengths(run(tmp_path / "long", log, *words, "minutes=100", script=slow))
    # without minutes trainings so far say what is long, as in the study `free`
    monkeypatch.setattr(growth, "MOST_TIMES", 0.5)
    assert of_lengths(run(tmp_path / "strict", log, *words, script=slow)) == []


def test_passes_count_in_the_time_that_is_expected(tmp_path: Path, log: PreparedLog) -> None:
    file = tmp_path / "passes.yaml"
    file.write_text(
        LENGTHS_ALONE.replace("[4, 8]", "4").replace("training: {", "training: {epochs: [1, 2], ")
    )

    def more_are_better(task: Task) -> FakeRun:
        if task.score_split is not None:
            return longer_is_better(task)
        passes = task.job.training.epochs
        assert isinstance(passes, int)
        ne = 0.9 - passes / 1000
        return FakeRun([TrainingEvent(best=quality(ne), measured=Measurements(train_seconds=10.0 * passes))])

    def steps(name: str, minutes: float) -> list[GrownAxis]:
        words = (f"space={file}", "trials=14", "sampler=random", f"minutes={minutes}")
        record = run(tmp_path / name, log, *words, script=more_are_better)
        return [step for step in record.grown if step.axis == "training.epochs"]

    # four passes are expected to take 40 s, a tenth of 400
    assert steps("enough", 8) != []
    assert steps("too few", 6) == []


def test_layers_with_recipes_of_their_own_get_no_more_of_them(tmp_path: Path, log: PreparedLog) -> None:
    file = tmp_path / "each.yaml"
    file.write_text(
        "layers: each\nmodules: {linear: {}, mlp: {mlp: [[8], [16]]}}\nslots: 1\ndepth: [1, 2]\nout_embeddings: "
        "[2, 4]\nraw_numeric: false\nensemble: sum\nmodel: {embedding_dim: 4, head: [[8]]}\n"
    )

    def deeper_is_better(task: Task) -> FakeRun:
        if task.score_split is not None:
            return longer_is_better(task)
        layers = getattr(task.job.model, "layers", ())
        ne = 0.9 - len(layers) / 100 - sum(layer.out_embeddings for layer in layers) / 1000
        return FakeRun([TrainingEvent(best=quality(ne), measured=Measurements())])

    record = run(
        tmp_path / "study", log, f"space={file}", "trials=24", "sampler=ranker", script=deeper_is_better
    )
    axes = {step.axis for step in record.grown}
    assert "depth" not in axes
    assert "layer.out_embeddings" in axes
    ends = {axis.ends for axis in record.axes if axis.setting == "layer.out_embeddings"}
    assert len(ends) == 1  # of all layers


def test_a_depth_that_another_space_has_grown_is_left_where_layers_are_apart(
    tmp_path: Path, log: PreparedLog
) -> None:
    """Both spaces go to two layers; the earlier study has grown to three."""
    recipe = "modules: {linear: {}}\nslots: 1\ndepth: [1, 2]\nout_embeddings: [2, 4]\nraw_numeric: false\n"
    recipe += "ensemble: sum\nmodel: {embedding_dim: 4, head: [[8]]}\n"
    recipe += "training: {learning_rate: {low: 0.001, high: 0.01, log: true}}\n"
    spaces = {}
    for layers in ("shared", "each"):
        spaces[layers] = tmp_path / f"{layers}.yaml"
        spaces[layers].write_text(f"layers: {layers}\n{recipe}")

    def deeper_is_better(task: Task) -> FakeRun:
        if task.score_split is not None:
            return longer_is_better(task)
        ne = 0.9 - len(getattr(task.job.model, "layers", ())) / 100
        return FakeRun([TrainingEvent(best=quality(ne), measured=Measurements())])

    words = (f"space={spaces['shared']}", "sampler=random", "trials=14")
    earlier = run(tmp_path / "earlier", log, *words, script=deeper_is_better)
    assert "depth" in {step.axis for step in earlier.grown}
    folder = written(tmp_path / "earlier")
    words = (f"space={spaces['each']}", "sampler=random", "trials=2", f"warm_start={folder}")
    record = run(tmp_path / "study", log, *words)
    assert "depth" not in {step.axis for step in record.grown}
    assert len(record.candidates) == 2


def test_a_warm_start_begins_with_the_wider_space(
    tmp_path: Path, log: PreparedLog, space: str, grown: GrownBy
) -> None:
    words = (space, "sampler=random")
    folder, earlier, _ = grown("random")
    record = run(tmp_path / "study", log, *words, "trials=3", f"warm_start={folder}")
    assert record.earlier[0].left == {}
    assert [(step.axis, step.end, step.earlier) for step in record.grown] == [
        (step.axis, step.end, str(folder)) for step in earlier.grown
    ]
    lowest = earlier.trial(earlier.front[-1])  # its best may be the baseline itself
    assert lowest.job.fingerprint in {trial.job.fingerprint for trial in record.candidates}
    written(tmp_path / "study")
    assert read_study(tmp_path / "study").grown == record.grown
    more = run(tmp_path / "study", log, *words, "trials=4", f"warm_start={folder}")
    assert more.grown == record.grown
    assert any(f"(in part as in {folder})" in line for line in sentences(record))


def test_a_warm_start_that_does_not_grow_leaves_what_lies_outside(
    tmp_path: Path, log: PreparedLog, space: str, grown: GrownBy
) -> None:
    folder, earlier, _ = grown("random")
    words = (space, "sampler=random", "trials=20", f"warm_start={folder}", "grow=no")
    record = run(tmp_path / "study", log, *words)
    assert record.grown == ()
    (study,) = record.earlier
    assert 0 < study.left["outside this space"]["embedding_dim: 16"] <= sum(n > 8 for n in lengths(earlier))
    assert study.reused + sum(study.left["outside this space"].values()) == study.candidates


def test_an_audit_takes_the_candidates_of_a_study_that_grew(
    log: PreparedLog, space: str, grown: GrownBy
) -> None:
    config = read_study_config(None, [*WORDS, space, "sampler=random", "trials=20"])
    subjects = taken(AuditedStudy(grown("random").record, config), log, "fp32")
    assert 16 in {subject.model.embedding_dim for subject in subjects}


def test_an_audit_takes_candidates_with_the_passes_that_their_study_found(
    tmp_path: Path, log: PreparedLog, space: str
) -> None:
    def several_passes_help(task: Task) -> FakeRun:
        if task.score_split is not None:
            return FakeRun([scored(task.score_split)])
        epochs = task.job.training.epochs
        ne = 0.9 - task.job.model.embedding_dim / 1000 - 0.01 * min(int(epochs), 3)
        return FakeRun(
            [evaluated(300, ne), TrainingEvent(best=quality(ne), measured=Measurements(train_seconds=1.0))]
        )

    words = (space, "sampler=random", "trials=20", "grow=no", "training.epochs=auto")
    record = run(tmp_path / "study", log, *words, script=several_passes_help)
    assert record.passes is not None
    config = read_study_config(None, [*WORDS, *words])
    subjects = taken(AuditedStudy(record, config), log, "fp32")
    assert {subject.training.epochs for subject in subjects} == {
        trial.job.training["epochs"] for trial in record.candidates
    }


def test_what_waits_for_the_tuning_stage_is_not_widened(tmp_path: Path, log: PreparedLog, space: str) -> None:
    """Also where the best are tuned ones at its end."""

    def decay_is_better(task: Task) -> FakeRun:
        if task.score_split is not None:
            return FakeRun([scored(task.score_split)])
        ne = 0.9 - 10 * task.job.training.table_decay + int(task.job.fingerprint[:4], 16) / 2**26
        return FakeRun([TrainingEvent(best=quality(ne), measured=Measurements(train_seconds=1.0))])

    words = ("trials=14", "tune=14", "sampler=random")
    before = run(tmp_path / "study", log, space, *words, script=decay_is_better)
    tuned = [trial for trial in before.candidates if trial.origin.tuned_from is not None]
    assert sum(trial.job.training["table_decay"] > 0.0 for trial in tuned) > 3
    after = run(tmp_path / "study", log, space, "trials=24", *words[1:], script=decay_is_better)
    assert len(after.candidates) > len(before.candidates)
    assert not [step for step in after.grown if step.axis == "training.table_decay"]
