"""Bytes of embedding tables: exact, a limit to which candidates are held before they train, and a front."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from command_line import SMALL, Run
from records import bare, judged, metrics

from dhen.config import ModelConfig
from dhen.errors import UserError
from dhen.inputs.features import matrices
from dhen.model import build_model, catalog, parse_model
from dhen.schema import FeatureSchema, Growing, Table
from search.analysis.averages import average_record, meets
from search.execution.plan_trial import check_some_tables_fit
from search.execution.trainer import new_record
from search.read_study import read_study
from search.samplers.context import CandidatePricer, evenly
from search.selection import pick, picked
from search.study_state import StudyState
from spaces.space import load_space
from trials.records.job import Job, TrainingConfig
from trials.records.serving_limits import Limits, ServingConfig
from trials.records.trial_record import JobSummary, Outcome, TrialKind, TrialRecord
from trials.training.embeddings.blocks import in_half

FEATURES = FeatureSchema(
    tables=(
        Table(name="user", rows=101, growing=Growing(capacity=100)),
        Table(name="site", rows=7),
        Table(name="item", rows=5000),
        Table(name="price__bucket", rows=6, buckets=True),
        Table(name="tags", rows=41, growing=Growing(capacity=40), multi_hot=True, mean_ids=2.5),
    ),
    numeric=("price",),
)
SHORT = {"family": "dhen", "layers": [{"modules": ["linear"]}]}
MODELS = catalog() | {
    "capacity": SHORT | {"embedding_dim": 4, "capacity_share": 0.25},
    "mixed": SHORT | {"embedding_dim": 32, "table_dim_exponent": 0.5},
    "interpolated": SHORT | {"embedding_dim": 8, "buckets": "interpolated"},
    "all": SHORT
    | {"embedding_dim": 16, "table_dim_exponent": 0.25, "capacity_share": 0.1, "buckets": "interpolated"},
}


def stored_bytes(model: ModelConfig, precision: str) -> int:
    """Bytes of the weights that the tables of a model really hold."""
    tables = build_model(model, FEATURES).features.tables
    if precision == "fp16":
        tables = in_half(tables)
    weights = [matrix.weight for matrix in matrices(tables).values()]
    return sum(weight.numel() * weight.element_size() for weight in weights)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_they_are_those_of_the_real_tables(name: str, precision: str) -> None:
    model = parse_model(MODELS[name], name)
    training = TrainingConfig(table_precision=precision, epochs=1)  # type: ignore[arg-type]
    job = Job(model=model, features=FEATURES, log="log", training=training, seed=0)
    record = new_record(0, TrialKind.CANDIDATE, {}, job)
    assert record.job.table_bytes == stored_bytes(model, precision)
    assert TrialRecord.model_validate_json(record.model_dump_json()) == record


def test_a_point_is_priced_as_its_trial() -> None:
    """Also where the space decides the precision."""
    space = load_space("tiny")
    for shared in ("fp32", "fp16"):
        training = TrainingConfig(table_precision=shared)  # type: ignore[arg-type]
        pricer = CandidatePricer(space, FEATURES, lambda _: True, training=training)
        priced = pricer.price(space.random_point(Random(0)))
        assert priced is not None
        assert priced.table_bytes == stored_bytes(priced.candidate.model, shared)


def test_a_record_of_before_says_them_too() -> None:
    old = {"fingerprint": "f", "embedding_parameters": 10, "training": {"table_precision": "fp16"}}
    assert JobSummary.model_validate(old).table_bytes == 20
    assert JobSummary().table_bytes is None


def test_an_average_has_those_of_all_its_networks() -> None:
    members = tuple(bare(n, ne=0.8, flops=1.0, table_bytes=size) for n, size in enumerate((100, 60)))
    assert average_record(5, members, metrics(0.7)).job.table_bytes == 160
    assert meets(Limits(max_table_bytes=160), members)
    assert not meets(Limits(max_table_bytes=159), members)


def test_the_worst_of_all_limits_counts() -> None:
    limits = Limits(serving=ServingConfig(max_flops=100), max_table_bytes=1000)
    taken = {"weights_bytes": 1, "table_bytes": 3000}
    assert limits.excess(flops=50, **taken) == 2.0
    assert limits.excess(flops=500, **taken) == 4.0
    assert Limits().excess(flops=500, **taken) is None
    assert Limits(max_table_bytes=1).excess(flops=1, weights_bytes=1, table_bytes=None) is None


def test_only_points_within_the_limit_are_drawn() -> None:
    space = load_space("tiny")
    sizes = sorted(
        {stored_bytes(pricer_of(None).price(point).candidate.model, "fp32") for point in some(space)}
    )  # type: ignore[union-attr]
    assert len(sizes) == 2
    for limit in sizes:
        drawn = list(islice(evenly(pricer_of(limit), set(), Random(0), {}), 30))
        assert {priced.table_bytes for priced in drawn} == {size for size in sizes if size <= limit}
    check_some_tables_fit(pricer_of(sizes[0]))
    with pytest.raises(UserError, match=f"would be with max_table_bytes={sizes[0]}"):
        check_some_tables_fit(pricer_of(sizes[0] - 1))


def pricer_of(limit: int | None) -> CandidatePricer:
    return CandidatePricer(load_space("tiny"), FEATURES, lambda _: True, Limits(max_table_bytes=limit))


def some(space):
    return [space.random_point(Random(seed)) for seed in range(20)]


def test_the_front_of_table_bytes_keeps_its_weights_and_is_picked_from() -> None:
    """Trial 2 has the lowest NE of those with small tables, and is on the front of FLOPs at no place."""
    facts = [(0.70, 10.0, 4096), (0.75, 5.0, 4096), (0.71, 20.0, 1024), (0.80, 30.0, 1024)]
    trials = [bare(n, ne=ne, flops=flops, table_bytes=size) for n, (ne, flops, size) in enumerate(facts)]
    record = (state := StudyState(judged([]), trials)).record()
    assert (record.front, record.table_bytes_front) == ((1, 0), (2, 0))
    assert 2 in {trial.number for trial in state.selection.kept}
    assert 2 not in {trial.number for trial in state.selection.trained}
    assert picked(record, "table_bytes<=1KiB").number == picked(record, "2").number == 2
    assert picked(record, " table_bytes <= 4.0 KiB").number == picked(record, "table_bytes<=5000").number == 0
    for limit, says in (
        ("1023", r"take 1 KiB \(1,024 bytes\)"),
        ("x", "such as 80GiB"),
        ("0", "greater than 0"),
    ):
        with pytest.raises(UserError, match=says):
            picked(record, f"table_bytes<={limit}")
    with pytest.raises(UserError, match="not known"):
        pick([bare(0, ne=0.7, flops=1.0)], "table_bytes<=1GiB")


@pytest.fixture(scope="module")
def free(dhen_search: Run, click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of three candidates with tables of two sizes."""
    out = tmp_path_factory.mktemp("free") / "study"
    dhen_search("run", "--data", click_log, "--out", out, "trials=3", "sampler=random", *SMALL)
    return out


@pytest.fixture(scope="module")
def sizes(free: Path) -> list[int]:
    return sorted({trial.job.table_bytes or 0 for trial in read_study(free).candidates})


def test_a_study_has_a_front_of_them(dhen_search: Run, free: Path, sizes: list[int], tmp_path: Path) -> None:
    assert len(sizes) == 2
    record = json.loads(dhen_search("status", free, "--json").stdout)
    candidates = [trial for trial in record["trials"] if trial["kind"] == "candidate"]
    for limit in sizes:
        within = [trial for trial in candidates if trial["job"]["table_bytes"] <= limit]
        best = min(within, key=lambda trial: trial["result"]["validation"]["ne"])
        assert best["number"] in record["table_bytes_front"]
        out = tmp_path / str(limit)
        dhen_search("export", free, "--pick", f"table_bytes<={limit}", "--out", out)
        assert json.loads((out / "bundle.json").read_text())["trial"] == best["number"]
        assert "within" in dhen_search("verify", out).stdout
    assert all(
        "max_table_bytes" not in trial["result"]["error"] for trial in candidates if trial["result"]["error"]
    )
    page = (free / "report.html").read_text()
    assert 'id="figure-table-bytes"' in page
    assert "bytes of embedding tables" in page


@pytest.mark.parametrize(
    ("verb", "limit", "says"),
    [
        (("export", "--out", "b"), "x", "such as 80GiB"),
        (("export", "--out", "b"), "1", "the smallest embedding tables on the front take"),
        (("export", "--out", "b"), "", "'table_bytes<=1GiB'"),
        (("ablate",), "1", "the smallest embedding tables on the front take"),
        (("slices", "--column", "site"), "x", "such as 80GiB"),
    ],
    ids=str,
)
def test_a_pick_that_is_none_is_said(
    dhen_search: Run, free: Path, verb: tuple[str, ...], limit: str, says: str, tmp_path: Path
) -> None:
    words = (verb[0], free, *verb[1:], "--pick", f"table_bytes<={limit}")
    said = dhen_search(*words, code=2, cwd=tmp_path).stderr
    assert says in said
    assert said.count("\n") == 1


def test_what_is_over_the_limit_is_not_trained(
    dhen_search: Run, click_log: Path, sizes: list[int], tmp_path: Path
) -> None:
    out, words = tmp_path / "study", ("trials=3", "sampler=random", *SMALL)
    limit = f"max_table_bytes={sizes[-1] - 1}"
    said = dhen_search("run", "--data", click_log, "--out", out, *words, limit).stdout
    record = read_study(out)
    refused = [trial for trial in record.candidates if trial.result.outcome is Outcome.INFEASIBLE]
    assert 0 < len(refused) < len(record.candidates)
    for trial in record.candidates:
        assert (trial in refused) == (trial.job.table_bytes == sizes[-1])
        assert bool(trial.attempts) == (trial not in refused)
        # what samplers are told (`search.samplers.ask_tell`)
        assert ((trial.plan.serving_excess or 0.0) > 0) == (trial in refused)
    assert all("over max_table_bytes=" in (trial.result.error or "") for trial in refused)
    baseline = record.trials[0]
    assert baseline.kind is TrialKind.BASELINE
    assert baseline.job.table_bytes > sizes[-1]  # type: ignore[operator]
    assert (baseline.result.outcome, baseline.plan.serving_excess > 0) == (Outcome.COMPLETED, True)  # type: ignore[operator]
    assert f"{len(refused)} of 3 candidates are over the limit max_table_bytes=" in " ".join(said.split())
    assert record.best in {trial.number for trial in record.candidates if trial not in refused}
    # all that were trained have tables of one size, so there is nothing to show of them
    assert 'id="figure-table-bytes"' not in (out / "report.html").read_text()
    other = dhen_search(
        "run", "--data", click_log, "--out", out, *words, "max_table_bytes=1GiB", code=2
    ).stderr
    assert "holds another study (max_table_bytes" in other


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("max_table_bytes=abc", "such as 80GiB (received 'abc')"),
        ("max_table_bytes=0", "greater than 0"),
        ("max_table_byte=1GiB", "Did you mean 'max_table_bytes'"),
        ("max_table_bytes=1KiB", "no candidate has embedding tables within max_table_bytes=1 KiB"),
    ],
)
def test_a_limit_that_cannot_be_met_is_said_before_anything_trains(
    dhen_search: Run, click_log: Path, tmp_path: Path, word: str, says: str
) -> None:
    out = tmp_path / "no"
    said = dhen_search("run", "--data", click_log, "--out", out, "trials=2", *SMALL, word, code=2).stderr
    assert says in said
    assert said.count("\n") == 1
    assert not (out / "trials").exists()
