"""Embedding tables on servers, in processes of their own: each way to keep ranks together does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import write_log
from servers.served_training import Served, a_job, a_task, failure, train_on_servers
from small_jobs import BATCH, apart
from torch import Tensor, nn

from dhen.members import cross_entropy
from dhen.model import build_model
from trials.data.loader import train_batches
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.data.read_options import GivenGrowing, ReadOptions
from trials.data.roles.infer import infer_schema
from trials.optim.adamw import Clip, MasterWeights, adamw, embedding_tables
from trials.optim.rowwise_adagrad import RowWiseAdagrad
from trials.records.job import Job
from trials.records.strategy import Ranks
from trials.store.weights import Weights
from trials.training.embeddings.growing import growing_rows
from trials.training.evaluation import evaluate
from trials.training.scoring import score

pytestmark = pytest.mark.usefixtures("one_thread")
ROUNDING, ROWS = 2e-5, 1510
GROWING = GivenGrowing(capacity=200, columns=("user", "tags"), admit_after=2)
"""With room for all ids that occur often enough: servers and one process give the same keys rows, of other
numbers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    log = write_log(folder / "log.csv", ROWS)
    prepare([log], out=folder / "log", schema=infer_schema([log]))
    prepare([log], out=folder / "growing", options=ReadOptions(growing=GROWING))
    return folder


def job_steps(folder: Path) -> int:
    return PreparedLog.open(folder / "log").split("train").rows // BATCH


def local(folder: Path, log: str = "log", **training: object) -> Served:
    job = a_job(PreparedLog.open(folder / log), **training)
    return train_on_servers(a_task(job, folder / log, "dp", 1), folder / "local")


def test_sync_equals_local_training(folder: Path) -> None:
    settings = {"table_decay": 0.01, "embedding_decay": 1e-4, "frequency_decay": 0.01}
    job = a_job(PreparedLog.open(folder / "log"), {"synchrony": "sync"}, **settings)
    plain = local(folder, **settings).weights
    for strategy in ("zero1+servers2", "dp+servers3=ssd+micro_batches=2"):
        served = train_on_servers(a_task(job, folder / "log", strategy, 2), folder / "sync")
        assert apart(served.weights, plain) < ROUNDING, strategy
        assert served.trained.measured.staleness == {0: job_steps(folder)}


def test_sync_gives_growing_tables_the_rows_of_local_training(folder: Path) -> None:
    job = a_job(PreparedLog.open(folder / "growing"), {"synchrony": "sync"})
    served = train_on_servers(
        a_task(job, folder / "growing", "dp+servers2", 2), folder / "growing_sync"
    ).weights
    plain = local(folder, "growing").weights
    log = PreparedLog.open(folder / "growing")
    mine, others = by_key(plain, log), by_key(served, log)
    assert mine.keys() == others.keys()
    assert len(mine) > 20
    assert all(torch.allclose(row, others[key], atol=ROUNDING) for key, row in mine.items())
    dense = {
        name: values for name, values in plain.items() if ".growing." not in name and ".tables." not in name
    }
    assert apart({name: served[name] for name in dense}, dense) < ROUNDING


def by_key(weights: Weights, log: PreparedLog) -> dict[tuple[str, int], Tensor]:
    """The embedding of each key of each growing table, whichever row it has."""
    model = build_model(a_job(log).model, log.features)
    model.load_state_dict(weights)
    rows = growing_rows(model)
    assert rows is not None
    found = {}
    for matrix in embedding_tables(model):
        for table, start in zip(matrix.tables, matrix.starts, strict=False):
            keys, its = rows.held(rows.tables.index(table)) if table.growing else ((), ())
            for key, row in zip(keys, its, strict=True):
                found[table.name, int(key)] = matrix.weight.detach()[start + int(row)]
    return found


def test_a_deterministic_delay_is_that_of_one_process(folder: Path) -> None:
    """Evaluations see all updates, and the delay begins anew after them."""
    staleness = ranks = 2
    tables = {"synchrony": "semi", "staleness": staleness, "deterministic_delay": True}
    log = PreparedLog.open(folder / "log")
    job = a_job(log, tables)
    served = train_on_servers(a_task(job, folder / "log", "dp+servers2", ranks), folder / "delayed")
    simulated, ne = simulate(job, log, staleness, ranks)
    assert served.ne == pytest.approx(ne, abs=1e-6)
    best = served.ne.index(min(served.ne))
    assert apart(served.weights, simulated[best]) < ROUNDING
    behind = served.trained.measured.staleness
    assert behind is not None
    assert max(behind) == staleness
    assert behind[staleness] >= sum(behind.values()) - 3 * staleness  # but for the beginnings


def simulate(job: Job, log: PreparedLog, staleness: int, workers: int) -> tuple[list[Weights], list[float]]:
    """Weights and NE at each evaluation of a training in one process, whose rows lack the updates of the last
    `staleness` steps, of each worker's part of the batch one after another."""
    config = job.training
    torch.manual_seed(job.seed)
    model = build_model(job.model, log.features).train()
    master = MasterWeights(model, "fp32")
    dense, clip = adamw([master.flat], config), Clip(config.clip_norm)
    tables = [table.weight for table in embedding_tables(model)]
    sparse = RowWiseAdagrad(tables, lr=config.embedding_learning_rate)
    versions, drained = [copies(tables)], 0
    parts = [
        train_batches(log.split("train"), batch_size=BATCH, seed=job.seed, epoch=0, rank=rank, ranks=workers)
        for rank in range(workers)
    ]
    examples, weights, found = 0, list[Weights](), list[float]()
    steps = log.split("train").rows // BATCH
    for step, batches in enumerate(zip(*parts, strict=True)):
        put(tables, versions[max(step - staleness, drained)])
        pushed = []
        for batch in batches:
            share = batch.size / BATCH
            loss = share * cross_entropy(model(batch.features), batch.label_B, batch.weight_B)
            loss.backward()  # type: ignore[no-untyped-call]
            pushed.append([table.grad for table in tables])
            for table in tables:
                table.grad = None
        master.gather_gradients()
        clip([master.flat.grad])
        dense.step()
        master.publish()
        put(tables, versions[step])
        for gradients in pushed:
            for table, gradient in zip(tables, gradients, strict=True):
                table.grad = gradient
            sparse.step()
        for table in tables:
            table.grad = None
        versions.append(copies(tables))
        examples += BATCH
        if examples >= (config.evaluate_every or 0) * (len(found) + 1) or step == steps - 1:
            drained = step + 1
            found.append(evaluate(model, log, "validation").ne)
            weights.append({name: values.clone() for name, values in model.state_dict().items()})
    return weights, found


def copies(tables: list[nn.Parameter]) -> list[Tensor]:
    return [table.detach().clone() for table in tables]


def put(tables: list[nn.Parameter], values: list[Tensor]) -> None:
    for table, value in zip(tables, values, strict=True):
        table.detach().copy_(value)


def test_semi_lags_within_its_bound_and_says_by_how_much(folder: Path) -> None:
    log = PreparedLog.open(folder / "log")
    job = a_job(log, {"synchrony": "semi", "staleness": 3})
    served = train_on_servers(a_task(job, folder / "log", "dp+servers2", 2), folder / "semi")
    behind = served.trained.measured.staleness
    assert behind is not None
    assert sum(behind.values()) == job_steps(folder)
    assert max(behind) <= 3
    assert set(behind) != {0}
    assert min(served.ne) < 1.0


def test_async_of_one_worker_equals_local_training(folder: Path) -> None:
    settings = {"table_decay": 0.01, "clip_norm": None}  # clipping turns a last bit into more
    job = a_job(PreparedLog.open(folder / "log"), {"synchrony": "async"}, **settings)
    served = train_on_servers(a_task(job, folder / "log", "dp+servers2", 1), folder / "async1")
    assert apart(served.weights, local(folder, **settings).weights) < ROUNDING


def test_async_workers_share_the_batches(folder: Path) -> None:
    log = PreparedLog.open(folder / "log")
    job = a_job(log, {"synchrony": "async"}, epochs=3)
    served = train_on_servers(a_task(job, folder / "log", "dp+servers2", 3), folder / "async3")
    steps = 3 * job_steps(folder)
    assert [event.point.examples for event in served.events if event.event == "evaluated"][
        -1
    ] == steps * BATCH
    behind = served.trained.measured.staleness
    assert behind is not None
    assert sum(behind.values()) == steps
    assert max(behind) > 0
    plain = build_model(job.model, log.features)
    plain.load_state_dict(served.weights)
    # what is evaluated is what is kept, whoever trained last
    assert evaluate(plain, log, "validation").ne == pytest.approx(min(served.ne), abs=1e-6)
    logs = [(folder / "async3" / f"attempt0.rank{rank}.log").read_text() for rank in (1, 2)]
    assert all("trained on " in text for text in logs)
    assert min(served.ne) < 1.0


@pytest.mark.parametrize(
    ("log", "tables", "before", "after"),
    [
        ("growing", {"synchrony": "sync"}, ("dp+servers2", 2), ("dp+servers3", 1)),
        ("log", {"synchrony": "async"}, ("dp+servers2", 1), ("dp+servers1", 1)),
    ],
)
def test_a_training_goes_on_from_what_servers_saved(
    folder: Path, log: str, tables: dict[str, object], before: tuple[str, int], after: tuple[str, int]
) -> None:
    job = a_job(PreparedLog.open(folder / log), tables, epochs=2)
    whole = train_on_servers(a_task(job, folder / log, *before), folder / "whole")
    name = folder / f"again-{after[0]}-{log}"
    kept = {"resume_from": str(name / "checkpoints"), "checkpoint_seconds": 0.0}
    name.mkdir()

    def stop(run: object, events: object) -> None:
        if len([event for event in events if event.event == "evaluated"]) == 2:  # type: ignore[attr-defined]
            run.kill()  # type: ignore[attr-defined]

    first = train_on_servers(a_task(job, folder / log, *before, **kept), name, stop)
    assert "killed" in failure(first)
    assert any((name / "checkpoints").glob("after-*/tables-server*"))
    second = train_on_servers(a_task(job, folder / log, *after, **kept), name)
    assert second.ne[:2] == pytest.approx(whole.ne[:2], abs=1e-6)
    # another number of servers counts the ids that wait for a row anew
    assert second.ne[2:] == pytest.approx(whole.ne[2:], abs=1e-4 if log == "log" else 5e-3)
    assert not any((name / "checkpoints").glob("*"))


def test_weights_on_servers_are_scored_as_any(folder: Path) -> None:
    log = PreparedLog.open(folder / "growing")
    job = a_job(log, {"synchrony": "async"})
    task = a_task(job, folder / "growing", "dp+servers2", 2)
    trained = train_on_servers(task, folder / "scored")
    served = train_on_servers(task.replace(score_split="test", resume_from="none"), folder / "scored")
    scored = next(event.metrics for event in served.events if event.event == "scored")
    plain = score(
        job,
        folder / "scored" / "weights.safetensors",
        log,
        "test",
        ranks=Ranks(),
        strategy=task.strategy,
        cluster=None,
    )
    assert scored.ne == pytest.approx(plain.ne, abs=1e-6)
    assert trained.trained.best.ne == pytest.approx(min(trained.ne))


def test_rows_may_be_stored_and_sent_in_half(folder: Path) -> None:
    log = PreparedLog.open(folder / "log")
    half = {"table_precision": "fp16", "all_to_all_precision": "bf16"}
    served = train_on_servers(
        a_task(a_job(log, {"synchrony": "sync"}, **half), folder / "log", "dp+servers2", 2), folder / "half"
    )
    exact = local(folder)
    assert served.ne == pytest.approx(exact.ne, abs=5e-3)
    assert served.ne != pytest.approx(exact.ne, abs=1e-6)


def test_a_worker_that_dies_ends_a_sync_training(folder: Path) -> None:
    job = a_job(PreparedLog.open(folder / "log"), {"synchrony": "sync"}, epochs=20)
    killed = []

    def kill_one(run: object, events: object) -> None:
        if events and not killed:
            killed.append(run._processes[1])  # type: ignore[attr-defined]
            killed[0]._process.kill()

    served = train_on_servers(a_task(job, folder / "log", "dp+servers2", 2), folder / "dies", kill_one)
    assert "rank 1 was killed" in failure(served)
