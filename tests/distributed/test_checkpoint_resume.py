"""A training that is killed goes on from its last checkpoint, also held in another way or on fewer ranks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_line import write_log
from gloo_ranks import RankError, RankGroup, forked, on_ranks
from interrupted import Interrupted, Told, run
from tools import needs

from dhen.errors import UserError
from dhen.model import build_model, parse_model
from dhen.values import file_hash
from trials.cluster.this_machine import load_cluster
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.records.events import Event
from trials.records.job import Job
from trials.records.places import PREFIX
from trials.records.strategy import Ranks, Strategy
from trials.training.checkpoint_files import damage, write_manifest
from trials.training.checkpointer import BEST, KEPT, STANDS, Checkpoints
from trials.training.distributed import zero_offload
from trials.training.distributed_step import DistributedStep
from trials.training.loop import train
from trials.training.memory_limit import limited_memory
from trials.training.step import Step, TrainStep, WeightAverage

ROWS, BATCH, EPOCHS, EVERY = 3000, 42, 2, 700
SHAPES = {2: (1, 2), 4: (2, 2)}
LAYER = {"modules": ["dcn_v2", "dlrm"], "out_embeddings": 3, "raw_numeric": True}
ON_FOUR = (
    Strategy(),
    Strategy(dense="zero1"),
    Strategy(dense="zero2", micro_batches=2),
    Strategy(dense="fsdp", offload=True),
    Strategy(dense="zero_offload", micro_batches=2),
    Strategy(dense="hsdp", checkpointing="full"),
)
ON_TWO = (
    Strategy(dense="fsdp"),
    Strategy(dense="zero2", checkpointing="full"),
    Strategy(dense="shard_grad_op", micro_batches=2, no_sync=True),
)
TOLERANCE = 1e-4

pytestmark = pytest.mark.usefixtures("one_thread")


def a_job(log: PreparedLog, *, dropout: float = 0.0, **training: object) -> Job:
    """Tables too narrow to be cut, and rates that do not amplify rounding (within a pass)."""
    model = parse_model({"embedding_dim": 4, "layers": [LAYER] * 2, "dropout": dropout}, "test")
    settings = {"batch_size": BATCH, "precision": "fp32", "epochs": EPOCHS, "evaluate_every": EVERY}
    settings |= {"learning_rate": 5e-4, "embedding_learning_rate": 0.01, "patience": 9} | training
    unresolved = {"model": model, "features": log.features, "log": log.fingerprint, "seed": 1}
    found = Job.model_validate(unresolved | {"training": settings})
    resolved = found.training.resolved(log.split("train").rows, "fp32")
    return found.replace(training=resolved)


def made(folder: Path) -> list[Path]:
    return list(folder.glob(f"{PREFIX}*"))


def gap(mine: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of any metric or training loss, or of a weight's mean size as a share of it."""
    pairs = [(mine["best"], other["best"])]
    for a, b in zip(mine["points"], other["points"], strict=True):
        assert (a["examples"], a["learning_rate"]) == (b["examples"], b["learning_rate"])
        pairs += [(a["train_loss"], b["train_loss"])]
        pairs += [(a["validation"][name], b["validation"][name]) for name in a["validation"]]
    assert mine["weights"].keys() == other["weights"].keys()
    pairs += [(size / (other["weights"][name] or 1.0), 1.0) for name, size in mine["weights"].items() if size]
    return max(abs(a - b) for a, b in pairs)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prepared log."""
    folder = tmp_path_factory.mktemp("resume")
    prepare([write_log(folder / "log.csv", ROWS)], out=folder / "log")
    return folder


Undisturbed = Callable[..., Told]


@pytest.fixture(scope="module")
def undisturbed_by() -> Undisturbed:
    """What a training is that nothing interrupts, by its settings: trained once for all that are held to it."""
    kept: dict[str, Told] = {}

    def told(log: PreparedLog, job: Job, **more: Any) -> Told:
        key = f"{job.model_dump_json()} {more}"
        if key not in kept:
            kept[key] = run(job, log, Told(), None, **more)
        return kept[key]

    return told


@pytest.fixture(scope="module")
def interrupted(shared: Path) -> Path:
    """The checkpoints of a training that was interrupted after 2,500 examples."""
    log, folder = PreparedLog.open(shared / "log"), shared / "interrupted on one"
    with pytest.raises(Interrupted):
        run(a_job(log), log, Told(at=2500), folder)
    return folder


# on one rank, in this process


@pytest.mark.parametrize(
    ("examples", "settings"),
    [
        (1300, {"dropout": 0.2, "frequency_decay": 0.1}),
        (2700, {"precision": "bf16", "plateau_factor": 0.1, "weight_average": 2, "table_precision": "fp16"}),
        (1300, {"table_decay": 0.02, "order": "log", "weight_average": 3, "schedule": "cosine"}),
        (
            2700,
            {
                "optimizer_precision": "bf16",
                "warmup_examples": 2000,
                "learning_rate_scaling": "sqrt",
                "clip_norm": 0.1,
            },
        ),
    ],
    ids=["dropout", "bf16", "table decay", "bf16 moments"],
)
def test_one_rank_goes_on_to_the_bit(
    shared: Path, tmp_path: Path, undisturbed_by: Undisturbed, settings: dict[str, Any], examples: int
) -> None:
    log = PreparedLog.open(shared / "log")
    job = a_job(log, **settings)
    undisturbed = undisturbed_by(log, job)
    with pytest.raises(Interrupted):
        run(job, log, Told(at=examples), tmp_path)
    steps = newest_steps(tmp_path)
    assert examples - 25 * BATCH <= steps * BATCH <= examples
    torch.rand(7)  # whatever happened to the generator meanwhile
    again = run(job, log, Told(), tmp_path)
    assert again.answer == undisturbed.answer
    for name, weight in undisturbed.weights.items():
        assert torch.equal(again.weights[name], weight), name
    assert made(tmp_path) == []


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(checkpointing="full"),
        Strategy(micro_batches=4, checkpointing="selective"),
        Strategy(dense="zero_offload"),
    ],
    ids=lambda strategy: strategy.name,
)
def test_one_rank_goes_on_with_other_techniques(
    shared: Path, tmp_path: Path, undisturbed_by: Undisturbed, strategy: Strategy
) -> None:
    log = PreparedLog.open(shared / "log")
    job = one_pass(log)
    undisturbed = undisturbed_by(log, job)
    with pytest.raises(Interrupted):
        run(job, log, Told(at=1500), tmp_path)
    assert gap(run(job, log, Told(), tmp_path, strategy=strategy).answer, undisturbed.answer) < TOLERANCE


@pytest.mark.parametrize("strategy", [Strategy(), Strategy(dense="zero_offload")], ids=lambda each: each.name)
def test_what_goes_on_needs_no_more_memory(shared: Path, tmp_path: Path, strategy: Strategy) -> None:
    log = PreparedLog.open(shared / "log")
    job = one_pass(log)
    peaks = []
    for at in (1500, None):
        # what is looked at below is the count, not the limit
        with limited_memory(2**40, torch.device("cpu")) as peak:
            told = Told() if at is None else Told(at=at)
            with contextlib.nullcontext() if at is None else pytest.raises(Interrupted):
                run(job, log, told, tmp_path, strategy=strategy)
            peaks.append(peak())
    fresh, gone_on = peaks
    assert gone_on == pytest.approx(fresh, rel=0.01)


@pytest.mark.parametrize("examples", [1500, 2600], ids="after {} examples".format)
@pytest.mark.parametrize(
    "more", [{}, {"precision": "bf16", "weight_average": 2, "dropout": 0.2, "clip_norm": 0.1}], ids=str
)
def test_delayed_updates_go_on_to_the_bit(
    shared: Path,
    tmp_path: Path,
    undisturbed_by: Undisturbed,
    more: dict[str, Any],
    examples: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From an evaluation, and from a checkpoint between two, which changes nothing."""
    monkeypatch.setattr(zero_offload, "DELAY_AFTER", 7)
    log, strategy = PreparedLog.open(shared / "log"), Strategy(dense="zero_offload")
    job = a_job(log, evaluate_every=2100, delayed_update=True, **more)
    undisturbed = undisturbed_by(log, job, strategy=strategy)
    with pytest.raises(Interrupted):
        run(job, log, Told(at=examples), tmp_path, strategy=strategy)
    steps = newest_steps(tmp_path)
    assert steps == (25 if examples == 1500 else 50)  # losses are looked at; an evaluation
    again = run(job, log, Told(), tmp_path, strategy=strategy)
    assert again.answer == undisturbed.answer
    for name, weight in undisturbed.weights.items():
        assert torch.equal(again.weights[name], weight), name
    at_once = undisturbed_by(log, a_job(log, evaluate_every=2100, **more), strategy=strategy)
    assert gap(at_once.answer, undisturbed.answer) > 1e-6


def test_delayed_updates_are_refused_where_nothing_delays_them(shared: Path) -> None:
    log = PreparedLog.open(shared / "log")
    job = a_job(log, delayed_update=True)
    for strategy in (Strategy(), Strategy(checkpointing="full")):
        with pytest.raises(
            UserError, match=r"delayed_update=true is planned with zero_offload.*Give technique=zero_off"
        ):
            run(job, log, Told(), None, strategy=strategy)


def test_learning_rates_fall_as_half_a_cosine(shared: Path) -> None:
    """After a warm-up that is said as a share of all passes."""
    log = PreparedLog.open(shared / "log")
    job = a_job(log, epochs=1, schedule="cosine", warmup_share=0.1)
    rows = log.split("train").rows
    curve = run(job, log, Told(), None).points
    shares = [(point["examples"] - BATCH) / rows for point in curve]  # before each evaluation's last step
    assert [point["learning_rate"] for point in curve] == pytest.approx(
        [5e-4 * 0.5 * (1 + math.cos(math.pi * share)) for share in shares]
    )


def test_short_trainings_make_none(shared: Path, tmp_path: Path) -> None:
    log, told = PreparedLog.open(shared / "log"), Told()
    folder = tmp_path / "checkpoints"
    train(a_job(log), log, told, keep=told.weights.update, progress_seconds=9.0, resume_from=folder)
    assert not folder.exists()


def test_best_weights_are_written_once(shared: Path, tmp_path: Path) -> None:
    """And lie in every checkpoint."""
    log, seen = PreparedLog.open(shared / "log"), set()

    def look() -> None:
        for path in made(tmp_path):
            if (path / BEST).exists():
                seen.add((path / BEST).stat().st_ino)

    class Looking(Told):
        def __call__(self, event: Event) -> None:
            look()
            super().__call__(event)

    told = run(a_job(log), log, Looking(), tmp_path)
    nes = [point["validation"]["ne"] for point in told.points]
    improved = sum(ne < min(nes[:place], default=math.inf) for place, ne in enumerate(nes))
    assert 1 <= len(seen) <= improved


def test_what_a_killed_one_left_half_written_does_no_harm(shared: Path, tmp_path: Path) -> None:
    log = PreparedLog.open(shared / "log")
    half = tmp_path / f".{PREFIX}999.partial"
    half.mkdir()
    (half / "part").touch()
    with pytest.raises(Interrupted):
        run(a_job(log), log, Told(at=1500), tmp_path)
    assert not half.exists()
    assert len(made(tmp_path)) == KEPT


def test_a_checkpoint_of_another_job_is_refused(shared: Path, interrupted: Path) -> None:
    log = PreparedLog.open(shared / "log")
    with pytest.raises(UserError, match="of another job"):
        run(a_job(log, learning_rate=0.5), log, Told(), interrupted)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """One bit, in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("name", "harm"), [("__0_0.distcp", halve), (STANDS, Path.unlink)])
def test_the_checkpoint_before_a_damaged_one_is_used(
    shared: Path,
    interrupted: Path,
    tmp_path: Path,
    undisturbed_by: Undisturbed,
    caplog: pytest.LogCaptureFixture,
    name: str,
    harm: Callable[[Path], None],
) -> None:
    log = PreparedLog.open(shared / "log")
    job, folder = a_job(log), tmp_path / "checkpoints"
    shutil.copytree(interrupted, folder)
    before, newest = sorted(made(folder), key=lambda path: int(path.name.removeprefix(PREFIX)))
    harm(newest / name)
    with caplog.at_level("INFO"):
        assert run(job, log, Told(), folder).answer == undisturbed_by(log, job).answer
    assert (
        f"{newest} was damaged and is removed: training goes on from the one before, {before.name}"
        in caplog.text
    )
    assert f"goes on from {before}, made by 1 rank(s)" in caplog.text


def test_a_flipped_bit_of_any_file_is_found(interrupted: Path, tmp_path: Path) -> None:
    """And one that is cut short or gone."""
    newest = max(made(interrupted), key=lambda path: int(path.name.removeprefix(PREFIX)))
    assert damage(newest, Ranks()) is None
    for name in [path.name for path in newest.iterdir()]:
        for harm in (flip, halve, Path.unlink):
            copy = tmp_path / f"{name} {harm.__name__}"
            shutil.copytree(newest, copy)
            harm(copy / name)
            assert damage(copy, Ranks()) is not None, copy.name


def test_without_a_whole_checkpoint_training_begins_anew(
    shared: Path,
    interrupted: Path,
    tmp_path: Path,
    undisturbed_by: Undisturbed,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = PreparedLog.open(shared / "log")
    job, folder = a_job(log), tmp_path / "checkpoints"
    shutil.copytree(interrupted, folder)
    for checkpoint in made(folder):
        halve(checkpoint / "__0_0.distcp")
    assert run(job, log, Told(), folder).answer == undisturbed_by(log, job).answer
    assert "__0_0.distcp is not what was written" in caplog.text
    assert "was damaged and is removed: training begins anew" in caplog.text


def only_one(folder: Path) -> Path:
    """The newest checkpoint; the one before is gone."""
    before, newest = sorted(made(folder), key=lambda path: int(path.name.removeprefix(PREFIX)))
    shutil.rmtree(before)
    return newest


def with_its_hashes(checkpoint: Path) -> None:
    """Writes the hashes anew, as whoever changes a checkpoint on purpose does."""
    with contextlib.suppress(OSError, ValueError):
        index = json.loads((checkpoint / "index.json").read_bytes())
        index["sha256"] = {name: file_hash(checkpoint / name) for name in index["sha256"]}
        (checkpoint / "index.json").write_text(json.dumps(index))
    write_manifest(checkpoint, {})


class Planted:
    """A pickle of it makes a folder when somebody unpickles it."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._proof),)


@pytest.mark.parametrize("where", ["index.json", ".metadata", "*.distcp"])
def test_a_pickle_planted_in_a_checkpoint_is_refused_and_not_run(
    shared: Path, interrupted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """In place of the index, in the place of DCP's own index, and in place of the tensors."""
    log, folder, proof = PreparedLog.open(shared / "log"), tmp_path / "checkpoints", tmp_path / "proof"
    shutil.copytree(interrupted, folder)
    newest = only_one(folder)
    targets = [newest / where] if where == ".metadata" else list(newest.glob(where))
    assert targets
    if where == ".metadata":
        (newest / "index.json").unlink()
    for target in targets:
        if where == "*.distcp":
            torch.save(Planted(proof), target)
        else:
            target.write_bytes(pickle.dumps(Planted(proof)))
    with_its_hashes(newest)
    if where == "*.distcp":
        with pytest.raises(UserError, match=r"cannot be read .* Delete it, and training begins anew"):
            run(a_job(log), log, Told(), folder)
    else:
        with pytest.raises(Interrupted):
            run(a_job(log), log, Told(at=0), folder)
        assert "was damaged and is removed: training begins anew" in caplog.text
    assert not proof.exists()
    pickle.loads(pickle.dumps(Planted(proof)))  # it would have
    assert proof.exists()


def test_an_index_cannot_point_outside_its_checkpoint(
    shared: Path, interrupted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, folder = PreparedLog.open(shared / "log"), tmp_path / "checkpoints"
    shutil.copytree(interrupted, folder)
    newest = only_one(folder)
    index = newest / "index.json"
    index.write_text(index.read_text().replace('"file":"', '"file":"../'))
    write_manifest(newest, {})
    with pytest.raises(Interrupted):
        run(a_job(log), log, Told(at=0), folder)
    assert "String should match pattern" in caplog.text
    assert "was damaged and is removed: training begins anew" in caplog.text


def test_killed_at_any_moment(shared: Path, tmp_path: Path, undisturbed_by: Undisturbed) -> None:
    """SIGKILL, twice, the second time after more training."""
    log, rng = PreparedLog.open(shared / "log"), random.Random(0)
    undisturbed = undisturbed_by(log, a_job(log, dropout=0.2)).answer
    last, output = -1, tmp_path / "alone.log"
    for kills in (True, True, False):
        process = forked(by_itself, output, shared, tmp_path)
        while kills and newest_steps(tmp_path) <= last and process.is_alive():
            time.sleep(0.005)
        if kills:
            time.sleep(rng.uniform(0.0, 0.2))
            process.kill()
        process.join()
        assert process.exitcode == 0 or (kills and process.exitcode == -signal.SIGKILL), output.read_text()
        last = max(last, newest_steps(tmp_path))
    assert json.loads((tmp_path / "alone.json").read_text()) == undisturbed


def by_itself(shared: Path, folder: Path) -> None:
    """The one rank that is killed at any moment."""
    log = PreparedLog.open(shared / "log")
    told = run(a_job(log, dropout=0.2), log, Told(), folder)
    (folder / "alone.json").write_text(json.dumps(told.answer))


def newest_steps(folder: Path) -> int:
    return max((int(path.name.removeprefix(PREFIX)) for path in made(folder)), default=-1)


# on several ranks


def one_pass(log: PreparedLog) -> Job:
    """With an average of weights, which each rank holds its part of."""
    return a_job(log, epochs=1, schedule="constant", weight_average=2)


def several(shared: Path) -> tuple[Ranks, dict[str, Any], PreparedLog]:
    world = dist.get_world_size()
    ranks = Ranks(dist.get_rank(), *SHAPES[world])
    cluster = load_cluster("zionex").with_ranks("x".join(map(str, SHAPES[world])))
    return ranks, {"ranks": ranks, "cluster": cluster}, PreparedLog.open(shared / "log")


def copied(folder: Path, name: str, ranks: Ranks) -> Path:
    copy = folder.with_name(name)
    if ranks.first:
        shutil.copytree(folder, copy)
    dist.barrier()
    return copy


def four_ranks(shared: Path) -> dict[str, Any]:
    """Interrupted under plain DP at half; from there under each strategy; and under plain DP from the start."""
    ranks, more, log = several(shared)
    job, folder = one_pass(log), shared / "interrupted"
    try:
        run(job, log, Told(at=1500), folder, **more)
    except Interrupted:
        dist.barrier()
    found, whole = {}, run(job, log, Told(), None, **more)
    for strategy in ON_FOUR:
        copy = copied(folder, strategy.name, ranks)
        resumed = run(job, log, Told(), copy, strategy=strategy, **more)
        found[strategy.name] = {"whole": whole.answer, "resumed": resumed.answer, "left": len(made(copy))}
    return found


def killed(shared: Path) -> None:
    """The last rank kills itself."""
    ranks, more, log = several(shared)

    def die() -> None:
        if ranks.rank == ranks.world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)

    run(one_pass(log), log, Told(at=1500, then=die), shared / "killed", **more)


def off_from_best(step: Step, job: Job, folder: Path, ranks: Ranks = Ranks()) -> float:  # noqa: B008
    """Of the newest of what a checkpoint's average is of; the best weights are of the same evaluation."""
    average = WeightAverage(step, job.training.weight_average)
    restored = Checkpoints(folder, job, ranks).restore(step, average)
    assert restored is not None
    assert len(restored[0].curve) > 1
    assert restored[1] is not None  # on every rank: no later evaluation need be better
    with average.in_place(restored[0].steps):
        pass
    held, best = step.weights(), restored[1] or {}  # type: ignore[attr-defined]
    return max((float((held[name] - w).abs().max()) for name, w in best.items() if w.numel()), default=0.0)


def two_ranks(shared: Path) -> dict[str, Any]:
    ranks, more, log = several(shared)
    job = one_pass(log)
    found, whole = {}, run(job, log, Told(), None, **more)
    for strategy in ON_TWO:
        copy = copied(shared / "interrupted", f"{strategy.name} on two", ranks)
        model = build_model(job.model, job.features)
        step = DistributedStep(model, job, strategy, ranks, more["cluster"], where=torch.device("cpu"))
        off = off_from_best(step, job, copy, ranks)
        resumed = run(job, log, Told(), copy, strategy=strategy, **more)
        found[strategy.name] = {"whole": whole.answer, "resumed": resumed.answer, "off": off}
    if ranks.first:  # the newest is damaged, too, where another rank looks
        newest = max(made(shared / "killed"), key=lambda path: int(path.name.removeprefix(PREFIX)))
        halve(newest / "__1_0.distcp")
    dist.barrier()
    again = run(job, log, Told(), shared / "killed", **more)
    found["killed"] = {"whole": whole.answer, "resumed": again.answer}
    return found


@pytest.fixture(scope="module")
def on_four(shared: Path) -> dict[str, Any]:
    found: dict[str, Any] = on_ranks(four_ranks, 4, shared)
    return found


@pytest.fixture(scope="module")
def on_two(shared: Path, on_four: dict[str, Any]) -> dict[str, Any]:
    """After one in which a rank was killed."""
    with pytest.raises(RankError, match="rank 1: died"):
        RankGroup().call(killed, 2, shared)
    assert len(made(shared / "killed")) == KEPT
    found: dict[str, Any] = on_ranks(two_ranks, 2, shared)
    return found


@needs("torchrec")
@pytest.mark.parametrize("strategy", ON_FOUR, ids=lambda strategy: strategy.name)
def test_four_ranks_go_on(on_four: dict[str, Any], strategy: Strategy) -> None:
    found = on_four[strategy.name]
    assert gap(found["resumed"], found["whole"]) < TOLERANCE
    assert found["left"] == 0


@needs("torchrec")
@pytest.mark.parametrize("strategy", ON_TWO, ids=lambda strategy: strategy.name)
def test_two_ranks_go_on_from_four(on_two: dict[str, Any], strategy: Strategy) -> None:
    assert gap(on_two[strategy.name]["resumed"], on_two[strategy.name]["whole"]) < TOLERANCE
    assert on_two[strategy.name]["off"] == 0.0


@needs("torchrec")
def test_ranks_go_on_after_one_was_killed(on_two: dict[str, Any]) -> None:
    assert gap(on_two["killed"]["resumed"], on_two["killed"]["whole"]) < TOLERANCE


@needs("torchrec")
def test_one_rank_goes_on_from_four(shared: Path, on_four: dict[str, Any]) -> None:
    log, copy = PreparedLog.open(shared / "log"), shared / "for one"
    shutil.copytree(shared / "interrupted", copy)
    job = one_pass(log)
    step = TrainStep(build_model(job.model, job.features), job.training)
    assert off_from_best(step, job, copy) == 0.0
    assert gap(run(job, log, Told(), copy).answer, run(job, log, Told(), None).answer) < TOLERANCE


def test_a_process_that_is_killed_while_it_removes_checkpoints_leaves_no_half_of_one(
    shared: Path,
    interrupted: Path,
    tmp_path: Path,
    undisturbed_by: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = PreparedLog.open(shared / "log")
    job, folder = a_job(log), tmp_path / "kept"
    shutil.copytree(interrupted, folder)
    assert made(folder)

    def killed(path: Path, **_: object) -> None:
        if path.exists():
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(Interrupted):
            Checkpoints(folder, job, Ranks(), 0.0).drop()
    assert len(made(folder)) == KEPT - 1
    assert run(job, log, Told(), folder).answer == undisturbed_by(log, job).answer


def test_checkpoints_by_the_clock_change_nothing_where_embeddings_decay(
    shared: Path, tmp_path: Path, undisturbed_by: Undisturbed
) -> None:
    """Rows decay when they are read; a checkpoint has all of them up to date, at moments that the steps decide."""
    log = PreparedLog.open(shared / "log")
    for precision in ("fp32", "fp16"):
        rates = {"table_decay": 0.02, "table_precision": precision}
        job = a_job(log, batch_size=14, epochs=1, evaluate_every=2400, **rates)
        undisturbed, folder = undisturbed_by(log, job), tmp_path / precision
        assert run(job, log, Told(), folder).answer == undisturbed.answer
        with pytest.raises(Interrupted):
            run(job, log, Told(at=1500), folder)
        assert newest_steps(folder) == 100
        assert run(job, log, Told(), folder).answer == undisturbed.answer


def test_best_weights_are_copied_where_a_file_system_has_no_hard_links(
    shared: Path, tmp_path: Path, undisturbed_by: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    log = PreparedLog.open(shared / "log")
    job = a_job(log)
    with pytest.raises(Interrupted):
        run(job, log, Told(at=2500), tmp_path)
    assert run(job, log, Told(), tmp_path).answer == undisturbed_by(log, job).answer
