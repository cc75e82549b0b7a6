"""Several shapes of ranks in one study: each candidate has the least in which a strategy fits, and says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Run
from priced import JOB
from records import bare

from dashboards.plans import attempts_table
from dashboards.terminal.tables import trial_table
from dhen.errors import UserError
from dhen.model import parse_model
from search.config import read_study_config
from search.execution.attempts import Execution
from search.execution.plan_trial import declared_clusters, plan_of, planned, with_plan
from search.execution.trainer import new_record
from search.mlflow.store import open_client, store_uri
from search.read_study import read_study
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.planner.estimates import PlanOptions
from trials.records.job import Job
from trials.records.strategy import named
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Attempt, Outcome, TrialKind, TrialRecord

MIB = 2**20
SHAPES = ("1x1", "1x2", "2x2")
SMALL, LARGE = 16, 1024


def wide_job(width: int, batch_size: int = 256) -> Job:
    layer = {"modules": [{"kind": "mlp", "mlp": [width]}], "out_embeddings": 4}
    model = parse_model({"embedding_dim": 16, "layers": [layer] * 2}, "test")
    return JOB.replace(model=model, training=JOB.training.replace(batch_size=batch_size))


def clusters(hbm: float, *shapes: str) -> tuple[Cluster, ...]:
    """Of CPUs, whose memory has nothing in it beforehand; without offload, which would make most things fit."""
    small = load_cluster("zionex").replace(device="cpu", host_memory_bytes=1)
    return tuple(small.with_ranks(shape).with_hbm(round(hbm * MIB)) for shape in shapes or SHAPES)


def needed(width: int, shape: str) -> int:
    """Bytes of a rank with which one strategy fits alone."""
    found = plan_of(wide_job(width), clusters(64.0, shape))
    return min(priced.memory.needed for priced in found.strategies if not priced.memory.host)


def test_each_job_has_the_least_shape_in_which_a_strategy_fits() -> None:
    bytes_needed = [needed(LARGE, shape) for shape in SHAPES]
    assert bytes_needed == sorted(bytes_needed, reverse=True)
    for shape, size in zip(SHAPES, bytes_needed, strict=True):
        found = plan_of(wide_job(LARGE), clusters(size / MIB))
        assert (found.shape, found.chosen is not None) == (shape, True)
        passed_over = SHAPES[: SHAPES.index(shape)]
        assert len(found.other_shapes) == len(passed_over)
        for name, words in zip(passed_over, found.other_shapes, strict=True):
            assert words.startswith(f"{name}: fits nowhere: ")
            assert "comes closest and lacks" in words
    assert plan_of(wide_job(SMALL), clusters(bytes_needed[1] / MIB)).shape == "1x1"


def test_within_a_shape_the_choice_is_that_of_a_plan_for_it_alone() -> None:
    size = needed(LARGE, "1x2") / MIB
    several, alone = (plan_of(wide_job(LARGE), given) for given in (clusters(size), clusters(size, "1x2")))
    assert several.chosen == alone.chosen
    assert several.best == alone.best
    assert (several.notes, alone.other_shapes) == (alone.notes, ())


def test_where_nothing_fits_the_shape_that_lacks_least_is_planned_and_all_are_told() -> None:
    size = needed(LARGE, "2x2") - MIB // 4
    found = plan_of(wide_job(LARGE), clusters(size / MIB))
    assert (found.chosen, found.shape, found.lacking_bytes) == (None, "2x2", MIB // 4)
    assert found.remedy is not None
    for shape in SHAPES:
        assert f"{shape}: " in found.remedy
    record = planned(new_record(1, TrialKind.CANDIDATE, {}, wide_job(LARGE)), wide_job(LARGE), clusters(1e-3))
    assert record.result.outcome is Outcome.INFEASIBLE
    assert record.plan.technique is None
    assert record.plan.memory_excess is not None
    assert record.plan.memory_excess > 0


def test_shapes_that_a_job_cannot_have_are_passed_over_with_what_they_say() -> None:
    options = PlanOptions(technique=named("zero1"))
    found = plan_of(wide_job(SMALL), clusters(64.0), options)
    assert (found.shape, found.chosen) == ("1x2", named("zero1"))
    assert found.other_shapes == (
        "1x1: technique=zero1: the parts of one model take all 1 ranks, and there is no data rank for zero1 to "
        "share with.",
    )
    few = plan_of(wide_job(LARGE, batch_size=2), clusters(1e-3))
    assert few.shape in ("1x1", "1x2")
    assert "2x2: training.batch_size=2 is less than one example for each of 4 ranks" in str(few.remedy)
    with pytest.raises(UserError, match="for each of 4 ranks"):
        plan_of(wide_job(SMALL, batch_size=1), clusters(64.0, "1x2", "2x2"))


def test_the_record_knows_its_shape_and_its_job_does_not() -> None:
    size = needed(LARGE, "1x2") / MIB
    given, job = clusters(size), wide_job(LARGE)
    record = with_plan(new_record(1, TrialKind.CANDIDATE, {}, job), plan_of(job, given))
    assert (record.plan.ranks, record.plan.summary and record.plan.summary.ranks) == ("1x2", "1x2")
    assert record.plan.summary is not None
    assert record.plan.summary.other_shapes[0].startswith("1x1: fits nowhere: ")
    assert TrialRecord.model_validate_json(record.model_dump_json()) == record
    small = with_plan(new_record(1, TrialKind.CANDIDATE, {}, job), plan_of(job, given[1:]))
    assert small.job == record.job
    its = Execution(given[0], given[0].hbm, larger=given[1:])
    assert (its.cluster_of(record), its.ranks(record)) == (given[1], 2)
    fields = its.task_fields(record, job)
    assert (fields["hosts"], fields["gpus_per_host"], fields["cluster"]) == (1, 2, given[1])
    assert its.cluster_of(bare(0, ne=0.9, flops=1.0)) == given[0]  # of an older version


def climbed(hbm: float, *shapes: str) -> list[TrialRecord]:
    """The record at each attempt of a trial that runs out of memory by a byte every time."""
    job, given = wide_job(LARGE), clusters(hbm, *shapes)
    its = Execution(given[0], given[0].hbm, larger=given[1:])
    record: TrialRecord | None = with_plan(
        new_record(1, TrialKind.CANDIDATE, {}, job),
        plan_of(job, given[:1], PlanOptions(memory_margin=-(2**40))),
    )
    steps = []
    while record is not None:
        steps.append(record)
        attempt = Attempt(
            strategy=record.plan.technique or "",
            plan=record.plan.summary,
            outcome=Outcome.OUT_OF_MEMORY,
            predicted_bytes=record.plan.peak_bytes,
            needed_bytes=(record.plan.peak_bytes or 0) + 1,
            limit_bytes=record.plan.peak_bytes,
        )
        record = record.replace(attempts=(*record.attempts, attempt))
        last = record.with_result(outcome=Outcome.OUT_OF_MEMORY, error="out of memory")
        record = its.next_attempt(last, job)
    steps.append(its.ended(last, job))
    return steps


def test_what_runs_out_of_memory_climbs_in_its_shape_and_then_to_the_next() -> None:
    *steps, ended = climbed(64.0)
    shapes = [step.plan.ranks for step in steps]
    assert [*dict.fromkeys(shapes)] == [*SHAPES]
    assert shapes == sorted(shapes, key=SHAPES.index)  # and never back
    for shape in SHAPES:
        names = [step.plan.technique for step in steps if step.plan.ranks == shape]
        assert len(names) == len({*names}) > 1
    first = next(step for step in steps if step.plan.ranks == "1x2")
    assert first.plan.summary is not None
    assert first.plan.summary.other_shapes == ("1x1: ran out of memory under all that was predicted to fit.",)
    assert first.plan.summary.ran_out == ()
    assert ended.result.error is not None
    assert ended.result.error.startswith("out of memory; 2x2: no other technique fits")


def test_a_next_shape_in_which_nothing_fits_is_none() -> None:
    *steps, ended = climbed(1.0, "1x1", "1x2")
    assert {step.plan.ranks for step in steps} == {"1x1"}
    assert str(ended.result.error).endswith("; nor does one fit in a larger shape")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("1x2,1x1", r"fewer ranks come first: ranks=1x1,1x2 \(received '1x2,1x1'\)"),
        ("1x1,1x2,1x1", "each is named once"),
        ("1x1,", "such as 2x4, or several such shapes: 1x1,1x2"),
        ("1x1,2", "such as 2x4, or several such shapes"),
        ("1x1;1x2", "such as 2x4, or several such shapes"),
        ("[]", "such as 2x4, or several such shapes"),
        ("[1x1, 0x2]", "such as 2x4, or several such shapes"),
    ],
)
def test_shapes_that_are_none(words: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_study_config(None, [f"ranks={words}"])


def test_shapes_of_a_study() -> None:
    for words in ("1x1,1x2,2x2", "1x1, 1x2 ,2x2", "[1x1, 1x2, 2x2]"):
        config = read_study_config(None, [f"ranks={words}"])
        assert (config.ranks, config.shapes) == ("1x1,1x2,2x2", SHAPES)
        assert config.declared_ranks == ((1, 1), (1, 2), (2, 2))
    assert read_study_config(None, ["ranks=2x4"]).shapes == ("2x4",)
    assert read_study_config(None, []).shapes == ()
    assert read_study_config(None, ["ranks=1x4,2x2"]).shapes == (
        "1x4",
        "2x2",
    )  # as many ranks, in either order


def test_what_a_rank_has_of_this_machine_is_the_same_in_all_shapes() -> None:
    one, two = declared_clusters("local", ("1x1", "1x2"), side_by_side=2)
    assert one.hbm == two.hbm
    (alone,) = declared_clusters("local", ("1x2",), side_by_side=1)
    assert two == alone  # of two places a large one has both
    _, four = declared_clusters("local", ("1x1", "1x4"), side_by_side=2)
    assert four.hbm < two.hbm


SPACE: dict[str, Any] = {
    "layers": "shared",
    "depth": [1, 2],
    "slots": 1,
    "modules": {"mlp": {"mlp": [[64], [1024]]}},
    "ensemble": ["sum"],
    "out_embeddings": [4],
    "raw_numeric": [False],
    "model": {"embedding_dim": [16], "numeric_mlp": [[16]], "head": [[]]},
    "start": [{"depth": 2, "layer.mlp.mlp": "1024"}, {"depth": 2, "layer.mlp.mlp": "64"}],
}
HBM = "6700KiB"
"""On one rank the wide network of two layers lacks half a MiB under every strategy; on two ranks it fits."""
WORDS = (
    *("demo.rows=4000", "ranks=1x1,1x2", f"hbm={HBM}", "trials=2", "baseline_trials=1", "sampler=random"),
    *("training.epochs=1", "training.batch_size=256", "training.precision=fp32", "threads=1", "parallel=2"),
)


@pytest.fixture(scope="module")
def several(dhen_search: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shapes") / "study"
    out.with_name("space.yaml").write_text(yaml.safe_dump(SPACE))
    dhen_search("run", "--out", out, f"space={out.with_name('space.yaml')}", *WORDS)
    return out


@pytest.fixture(scope="module")
def record(several: Path) -> StudyRecord:
    return read_study(several)


def test_candidates_of_one_study_train_in_different_shapes(record: StudyRecord, several: Path) -> None:
    assert {trial.plan.ranks for trial in record.candidates} == {"1x1", "1x2"}
    for trial in (trial for trial in record.trials if not trial.shared):
        assert trial.result.outcome is Outcome.COMPLETED
        last = trial.attempts[-1]
        assert last.plan is not None
        assert last.plan.ranks == trial.plan.ranks
        assert last.executed is not None
        assert named(last.executed).held_as == named(last.strategy).held_as
        assert last.predicted_bytes is not None
        assert last.measured_bytes is not None
        assert last.measured_bytes == pytest.approx(last.predicted_bytes, rel=0.05)
        ranks = 2 if trial.plan.ranks == "1x2" else 1
        logs = [*(several / "trials" / f"{trial.number:05d}").glob("attempt0.rank*.log")]
        assert len(logs) == ranks
        assert last.plan.examples_per_rank == 256 // ranks
        why = [sentence.partition(":")[0] for sentence in last.plan.other_shapes]
        assert why == (["1x1"] if ranks == 2 else [])


def test_the_study_tells_everywhere_in_which_shape_each_trained(
    dhen_search: Run, record: StudyRecord, several: Path
) -> None:
    wide = next(trial for trial in record.candidates if trial.plan.ranks == "1x2")
    assert record.cluster is not None
    assert record.cluster.shapes == ("1x1", "1x2")
    plans = {
        path.parents[1].name: json.loads(path.read_text()) for path in several.glob("artifacts/**/plan.json")
    }
    assert sorted(plan["ranks"] for plan in plans.values()) == sorted(
        str(trial.plan.ranks) for trial in record.trials
    )
    page = (several / "report.html").read_text()
    assert "1x1: fits nowhere: " in page
    assert "1x1 or 1x2 ranks of 6.5 MiB" in page
    status = json.loads(dhen_search("status", several, "--json").stdout)
    assert status["trials"][wide.number]["plan"]["ranks"] == "1x2"
    said = dhen_search("status", several).stdout
    assert "Ranks: " in said
    assert "ranks" in [column.header for column in trial_table(record).columns]
    rows = {row[0]: row for row in attempts_table(record).rows}
    assert rows[str(wide.number)][1].endswith(" on 1x2")
    assert rows[str(wide.number)][2].startswith("1x1: fits nowhere: ")

    client = open_client(store_uri(several))
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    tags = {run.data.tags.get("trial.number"): run.data.tags.get("ranks") for run in runs}
    for trial in record.trials:
        assert tags[str(trial.number)] == trial.plan.ranks


def test_the_study_goes_on_with_its_shapes_and_no_others(
    dhen_search: Run, record: StudyRecord, several: Path
) -> None:
    words = ("run", "--out", several, f"space={several.with_name('space.yaml')}", *WORDS)
    assert "ranks: '1x1,1x2' there, '1x2' now" in dhen_search(*words, "ranks=1x2", code=2).stderr
    dhen_search(*words, "trials=3")
    again = read_study(several)
    assert [trial.plan for trial in again.trials[: len(record.trials)]] == [t.plan for t in record.trials]
    assert len(again.candidates) == len(record.candidates) + 1


def test_a_plan_that_is_too_sure_ends_in_the_next_shape(
    dhen_search: Run, several: Path, tmp_path: Path
) -> None:
    """On one rank the wide network is tried under a strategy that lacks a little, and runs out of memory."""
    out, words = tmp_path / "study", (f"space={several.with_name('space.yaml')}", *WORDS)
    dhen_search("run", "--out", out, *words, "memory_margin=-1MiB")
    wide = next(trial for trial in read_study(out).candidates if trial.plan.ranks == "1x2")
    assert wide.result.outcome is Outcome.COMPLETED
    ran_out = [attempt for attempt in wide.attempts if attempt.outcome is Outcome.OUT_OF_MEMORY]
    assert [attempt.plan and attempt.plan.ranks for attempt in ran_out] == ["1x1"] * len(ran_out) != []
    last = wide.attempts[-1]
    assert last.plan is not None
    assert (last.outcome, last.plan.ranks) == (Outcome.COMPLETED, "1x2")
    assert last.plan.other_shapes == ("1x1: ran out of memory under all that was predicted to fit.",)
    assert " on 1x1: out of memory" in next(
        row[3] for row in attempts_table(read_study(out)).rows if " on 1x2" in row[3]
    )


def test_one_configuration_is_planned_and_trained_in_the_least_shape(
    dhen_search: Run, record: StudyRecord, tmp_path: Path
) -> None:
    wide = next(trial.job.model for trial in record.candidates if trial.plan.ranks == "1x2")
    training = {"batch_size": 256, "precision": "fp32", "epochs": 1}
    (tmp_path / "wide.yaml").write_text(yaml.safe_dump({"model": wide, "training": training}))
    log, out, words = tmp_path / "log.csv", tmp_path / "out", ("ranks=1x1,1x2", f"hbm={HBM}")
    dhen_search("demo", "--out", log, "rows=4000")
    (plan,) = json.loads(dhen_search("plan", tmp_path / "wide.yaml", "--data", log, "--json", *words).stdout)
    assert (plan["hosts"], plan["gpus_per_host"]) == (1, 2)
    assert plan["other_shapes"][0].startswith("1x1: fits nowhere: ")
    dhen_search("train", tmp_path / "wide.yaml", "--data", log, "--out", out, *words)
    bundle = json.loads((out / "bundle.json").read_text())
    assert bundle["planned_technique"] == bundle["executed_technique"] == plan["chosen"]
