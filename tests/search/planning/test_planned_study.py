"""A study that plans for a declared cluster: techniques, what cannot fit, what the sampler learns of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from command_line import Run

from dhen.errors import UserError
from dhen.schema import FeatureSchema
from dhen.values import parse
from search.config import read_study_config
from search.execution.plan_trial import LOCAL, MOST_ITEMISED, declared_cluster, planned
from search.execution.trainer import new_record
from search.read_study import read_study
from search.samplers.ask_tell import Proposals
from search.samplers.context import CandidatePricer
from spaces.space import Point, Space, load_space
from trials.cluster import machine
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster, this_machine
from trials.planner.plan import plan
from trials.records.job import Job, TrainingConfig
from trials.records.trial_record import Metrics, Outcome, TrialKind, TrialRecord

SCHEMA = {
    "tables": [{"name": f"t{index}", "rows": 20_000} for index in range(8)],
    "numeric": ["price", "visits"],
}
TRAINING = TrainingConfig(batch_size=4096, precision="fp32")


def job(point: Point, space: Any) -> Job:
    candidate = space.decode(point)
    return Job(model=candidate.model, features=SCHEMA, log="", training=TRAINING, seed=0)


def proposed(number: int, point: Point, space: Any, cluster: Cluster) -> TrialRecord:
    """A candidate with its plan; where it fits, with a made-up NE that larger models have lower."""
    its = job(point, space)
    record = planned(new_record(number, TrialKind.CANDIDATE, point, its), its, cluster)
    if record.result.outcome is Outcome.INFEASIBLE:
        return record
    assert record.job.flops is not None
    ne = 0.8 - 0.003 * math.log(record.job.flops) + 0.002 * Random(record.job.fingerprint).random()
    quality = Metrics(ne=ne, log_loss=ne, auc=0.7, calibration=1.0, examples=10)
    return record.with_result(outcome=Outcome.COMPLETED, validation=quality)


def pricer(space: Space) -> CandidatePricer:
    """For samplers that do not ask what fits."""
    return CandidatePricer(space, parse(FeatureSchema, SCHEMA, "schema"), lambda _: True)


@pytest.fixture(scope="module")
def half() -> Cluster:
    """A cluster on which about half of a space's candidates fit; CPUs, so that nothing is taken beforehand."""
    space = load_space("default")
    roomy = load_cluster("a100-80gb").with_ranks("1x2").replace(device="cpu")
    asked = Proposals(pricer=pricer(space), sampler="random", seed=1)
    needs = []
    for number in range(40):
        its = job(asked.ask(number, {})[0], space)
        ladder = plan(its.model, its.features, its.training, roomy).strategies
        needs.append(min(each.memory.total for each in ladder))
    return roomy.with_hbm(sorted(needs)[len(needs) // 2])


def infeasible(cluster: Cluster, seed: int) -> list[bool]:
    """Of the proposals of one study, in order, which did not fit."""
    space = load_space("default")
    asked = Proposals(pricer=pricer(space), sampler="tpe", seed=seed)
    misses = []
    for number in range(80):
        point, notes = asked.ask(number, {})
        record = proposed(number, point, space, cluster).with_origin(sampler_notes=notes)
        misses.append(record.result.outcome is Outcome.INFEASIBLE)
        asked.tell(record)
    return misses


def test_the_share_of_infeasible_proposals_falls(half: Cluster) -> None:
    misses = infeasible(half, seed=2)
    assert sum(misses[-30:]) <= sum(misses[:30]) / 2


def test_an_infeasible_candidate_says_what_it_lacks(half: Cluster) -> None:
    space = load_space("tiny")
    point, _ = Proposals(pricer=pricer(space), sampler="random", seed=0).ask(0, {})
    its, small = job(point, space), half.with_hbm(100 * 2**10)
    record = planned(new_record(0, TrialKind.CANDIDATE, point, its), its, small)
    assert record.result.outcome is Outcome.INFEASIBLE
    assert record.plan.technique is None
    assert record.plan.summary is not None
    assert record.result.error == record.plan.summary.remedy
    assert record.plan.memory_excess is not None
    assert record.plan.memory_excess > 0
    assert record.result.seconds is not None
    baseline = planned(new_record(0, TrialKind.BASELINE, point, its), its, small)
    assert baseline.result.outcome is Outcome.RUNNING  # NE needs one: it is trained, and the report warns
    assert baseline.plan.summary is not None
    assert not baseline.plan.summary.fits


def techniques(strategy: str) -> int:
    """Their number: plain DP is none, nor is how the gradients of micro-batches are sent."""
    return len(set(strategy.split("+")) - {"dp", "no_sync"})


def test_a_plan_is_kept_with_what_it_passed_over(half: Cluster) -> None:
    space = load_space("default")
    asked = Proposals(pricer=pricer(space), sampler="random", seed=2)
    more = []
    for number in range(30):
        record = proposed(number, asked.ask(number, {})[0], space, half)
        kept = record.plan.summary
        assert kept is not None
        assert TrialRecord.model_validate_json(record.model_dump_json()) == record
        if kept.strategy is None:  # the tables alone are too much
            assert record.result.outcome is Outcome.INFEASIBLE
            continue
        assert sum(kept.memory_bytes.values()) == record.plan.peak_bytes
        items = dict(kept.step_seconds)
        hidden = items.pop("hidden")
        assert record.plan.step_seconds == pytest.approx(sum(items.values()) - hidden)
        if kept.fits:
            assert kept.strategy == record.plan.technique
            assert record.plan.memory_excess <= 0
            assert record.plan.peak_bytes <= half.hbm
            fewer = [each for each in kept.rejected if techniques(each.strategy) < techniques(kept.strategy)]
            assert all(each.lacking_bytes > 0 for each in fewer)
            itemised = [each for each in kept.rejected if each.items]
            assert len(itemised) <= MOST_ITEMISED
            assert all(sum(each.items.values()) == each.memory_bytes for each in itemised)
            assert all(each.reason and each.step_seconds for each in itemised)
            assert {each.strategy for each in fewer if techniques(each.strategy) == 0} <= {
                each.strategy for each in itemised
            }
            more += [number] if record.plan.technique != "dp" else []
    assert more


@pytest.fixture
def _two_threads() -> Iterator[None]:
    """Speeds are measured with two threads, of which two trials side by side have one each."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    this_machine.cache_clear()
    yield
    this_machine.cache_clear()
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_this_machine_is_shared_by_what_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)
    whole, halved = declared_cluster(LOCAL), declared_cluster(LOCAL, side_by_side=2)
    assert halved.hbm == whole.hbm // 2
    assert "shared by 2" in halved.sources["hbm"]
    assert halved.peak_flops.fp32 == pytest.approx(whole.peak_flops.fp32 / 2)
    assert "threads per rank" in halved.sources["peak_flops.fp32"]
    assert declared_cluster(LOCAL, None, 2**30, side_by_side=2).hbm == 2**30
    assert declared_cluster("h100", side_by_side=4) == load_cluster("h100")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("cluster=zionx",), "Did you mean 'zionex'"),
        (("cluster=none.yaml",), "no such file"),
        (("cluster=zionex", "training.batch_size=100"), "give at least 128"),
        (("hbm=0",), "greater than 0"),
    ],
    ids=str,
)
def test_mistakes_leave_the_directory_free(
    dhen_search: Run, click_log: Path, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    out = tmp_path / "study"
    assert says in dhen_search("run", "--data", click_log, "--out", out, *words, code=2).stderr
    assert not (out / "study.yaml").exists()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("ranks=2by4", "such as 2x4"),
        ("ranks=0x4", "such as 2x4"),
        ("ranks=8", "such as 2x4"),
        ("ranks=-1x4", "such as 2x4"),
        ("hbm=0", "greater than 0"),
        ("hbm=-2GiB", "at least 0"),
        ("hbm=many", "80GiB"),
        ("prefer=cheapest", "'least' or 'fastest'"),
        ("clsuter=zionex", "Did you mean 'cluster'"),
    ],
)
def test_settings_that_are_none(word: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_study_config(None, [word])


def test_memory_is_kept_in_bytes() -> None:
    config = read_study_config(None, ["hbm=24MiB", "ranks=2x4"])
    assert config.hbm == 24 * 2**20
    assert read_study_config(None, [f"hbm={24 * 2**20}", "ranks=2x4"]) == config


@pytest.fixture(scope="module")
def planned_study(dhen_search: Run, click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study for two hosts of two ranks with so little memory that candidates differ in what they need."""
    folder = tmp_path_factory.mktemp("planned")
    (cluster,) = json.loads(dhen_search("clusters", "zionex", "--json").stdout)
    # a rank of the host's own memory, no device: no context and no reserve beside a few MiB of tensors
    small = cluster | {"name": "small", "device": "cpu", "hosts": 2, "gpus_per_host": 2}
    (folder / "small.yaml").write_text(yaml.safe_dump(small))
    (folder / "space.yaml").write_text(yaml.safe_dump(SPACE))
    words = (f"cluster={folder / 'small.yaml'}", f"hbm={HBM}", f"space={folder / 'space.yaml'}")
    out = folder / "study"
    dhen_search("run", "--data", click_log, "--out", out, *words, *SETTINGS)
    return out


HBM = "420KiB"
SPACE = {
    "layers": "shared",
    "depth": [1, 2, 4],
    "slots": 1,
    "modules": {"mlp": {"mlp": [[16], [64], [256]]}, "linear": {}},
    "out_embeddings": [4, 16],
    "raw_numeric": False,
    "ensemble": "sum",
    "model": {"embedding_dim": [4, 8, 16], "numeric_mlp": [[16]], "head": [[], [128]]},
    "start": [
        {"depth": 1, "layer.block0": "mlp", "layer.mlp.mlp": mlp, "layer.out_embeddings": out}
        | {"embedding_dim": dim, "head": head}
        for mlp, out, dim, head in (("16", 4, 4, "none"), ("64", 4, 16, "none"), ("16", 16, 16, "128"))
    ]
    + [
        {"depth": 1, "layer.block0": "linear", "layer.out_embeddings": 16, "embedding_dim": 4, "head": "128"},
        {"depth": 2, "layer.block0": "mlp", "layer.mlp.mlp": "64", "layer.out_embeddings": 16}
        | {"embedding_dim": 4, "head": "none"},
    ],
}
"""Its start points need four techniques, and the third fits under none."""
SETTINGS = (
    "trials=6",
    "sampler=random",
    "baseline_trials=1",
    "training.epochs=1",
    "training.batch_size=512",
    "training.precision=fp32",
    "threads=1",
    "parallel=2",
)


def test_candidates_of_one_study_get_different_techniques(planned_study: Path) -> None:
    record = read_study(planned_study)
    assert record.cluster is not None
    assert (record.cluster.name, record.cluster.hosts, record.cluster.gpus_per_host) == ("small", 2, 2)
    chosen = {trial.plan.technique for trial in record.candidates} - {None}
    assert len(chosen) >= 4
    for trial in record.candidates:
        if trial.result.outcome is Outcome.INFEASIBLE:
            assert trial.plan.technique is None
            assert trial.result.technique is None
            assert trial.result.error
            assert trial.attempts == ()  # nothing was started
        else:
            assert trial.result.outcome is Outcome.COMPLETED
            assert trial.result.technique == "dp"
    assert any(trial.result.outcome is Outcome.INFEASIBLE for trial in record.candidates)


def test_the_report_and_mlflow_have_the_plans(planned_study: Path) -> None:
    record = read_study(planned_study)
    page = (planned_study / "report.html").read_text()
    for trial in record.candidates:
        assert (trial.plan.technique or "infeasible") in page
    assert "Planned for small (2 x 2 ranks of 420.0 KiB, numbers unverified)" in page
    plans = [json.loads(path.read_text()) for path in planned_study.glob("artifacts/**/plan.json")]
    assert len(plans) == len([trial for trial in record.trials if trial.plan])
    assert {plan["cluster"]["name"] for plan in plans} == {"small"}
    assert {plan["strategy"] for plan in plans if plan["fits"]} == {
        trial.plan.technique for trial in record.trials if trial.plan.technique
    }


def test_a_study_keeps_to_its_cluster(dhen_search: Run, click_log: Path, planned_study: Path) -> None:
    """What it was planned for cannot change under it; the same words go on."""
    before = read_study(planned_study)
    folder = planned_study.parent
    words = ("run", "--data", click_log, "--out", planned_study, f"space={folder / 'space.yaml'}", *SETTINGS)
    same = (f"cluster={folder / 'small.yaml'}", f"hbm={HBM}")
    assert "cluster: " in dhen_search(*words, f"hbm={HBM}", code=2).stderr
    assert "hbm: " in dhen_search(*words, same[0], "hbm=2MiB", code=2).stderr
    dhen_search(*words, *same)
    assert read_study(planned_study).trials == before.trials
    text = (folder / "small.yaml").read_text()
    try:
        data = yaml.safe_load(text)
        (folder / "small.yaml").write_text(yaml.safe_dump(data | {"memory_bandwidth": "1GB/s"}))
        assert "another cluster" in dhen_search(*words, *same, code=2).stderr
    finally:
        (folder / "small.yaml").write_text(text)


def test_a_bundle_carries_what_was_planned(study: Path) -> None:
    """A study that names no cluster is planned for the machine it runs on."""
    record = read_study(study)
    assert record.cluster is not None
    assert record.cluster.name == "this"
    assert {trial.plan.technique for trial in record.trials} == {"dp"}
    info = json.loads((study / "best" / "bundle.json").read_text())
    assert (info["planned_technique"], info["executed_technique"]) == ("dp", "dp")
