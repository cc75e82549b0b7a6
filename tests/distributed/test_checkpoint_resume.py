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
from interrupted import Interrupted, Told, broken_off, run
from small_jobs import BATCH, LAYER, a_job
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

ROWS = 1500
SHAPES = {2: (1, 2), 4: (2, 2)}
ON_FOUR = (
    Strategy(),
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
TOLERANCE = 3e-4
"""Two rows that change places are 2e-4 of an AUC."""

pytestmark = pytest.mark.usefixtures("one_thread")


def job_of(log: PreparedLog, *, dropout: float = 0.0, **training: object) -> Job:
    """Tables too narrow to be cut, and rates that do not amplify rounding (within a pass)."""
    model = parse_model({"embedding_dim": 4, "layers": [LAYER] * 2, "dropout": dropout}, "test")
    settings = {"epochs": 2, "evaluate_every": 350, "learning_rate": 5e-4, "embedding_learning_rate": 0.01}
    return a_job(log, model, **settings | training)


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


@pytest.fixture(scope="module")
def log(shared: Path) -> PreparedLog:
    return PreparedLog.open(shared / "log")


Undisturbed = Callable[..., Told]


@pytest.fixture(scope="module")
def undisturbed_by(log: PreparedLog) -> Undisturbed:
    """What a training is that nothing interrupts, by its settings: trained once for all that are held to it."""
    kept: dict[str, Told] = {}

    def told(job: Job, **more: Any) -> Told:
        key = f"{job.model_dump_json()} {more}"
        if key not in kept:
            kept[key] = run(job, log, Told(), None, **more)
        return kept[key]

    return told


def assert_same(mine: Told, other: Told) -> None:
    assert mine.answer == other.answer
    for name, weight in other.weights.items():
        assert torch.equal(mine.weights[name], weight), name


@pytest.fixture(scope="module")
def interrupted(log: PreparedLog, shared: Path) -> Path:
    """The checkpoints of a training that was interrupted after 1,250 examples."""
    broken_off(job_of(log), log, shared / "interrupted on one", 1250)
    return shared / "interrupted on one"


@pytest.fixture
def checkpoints(interrupted: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(interrupted, tmp_path / "checkpoints"))


# on one rank, in this process


@pytest.mark.parametrize(
    ("examples", "settings"),
    [
        (650, {"dropout": 0.2, "frequency_decay": 0.1}),
        (1350, {"precision": "bf16", "plateau_factor": 0.1, "weight_average": 2, "table_precision": "fp16"}),
        (650, {"table_decay": 0.02, "order": "log", "weight_average": 3, "schedule": "cosine"}),
        (
            1350,
            {
                "optimizer_precision": "bf16",
                "warmup_examples": 1000,
                "learning_rate_scaling": "sqrt",
                "clip_norm": 0.1,
            },
        ),
    ],
    ids=["dropout", "bf16", "table decay", "bf16 moments"],
)
def test_one_rank_goes_on_to_the_bit(
    log: PreparedLog, tmp_path: Path, undisturbed_by: Undisturbed, settings: dict[str, Any], examples: int
) -> None:
    job = job_of(log, **settings)
    undisturbed = undisturbed_by(job)
    broken_off(job, log, tmp_path, examples)
    assert 0 < newest_steps(tmp_path) * BATCH <= examples
    torch.rand(7)  # whatever happened to the generator meanwhile
    assert_same(run(job, log, Told(), tmp_path), undisturbed)
    assert made(tmp_path) == []


def test_one_rank_goes_on_with_other_techniques(
    log: PreparedLog, tmp_path: Path, undisturbed_by: Undisturbed
) -> None:
    job = one_pass(log)
    broken_off(job, log, tmp_path / "first", 750)
    for strategy in (
        Strategy(checkpointing="full"),
        Strategy(micro_batches=4, checkpointing="selective"),
        Strategy(dense="zero_offload"),
    ):
        copy = Path(shutil.copytree(tmp_path / "first", tmp_path / strategy.name))
        again = run(job, log, Told(), copy, strategy=strategy)
        assert gap(again.answer, undisturbed_by(job).answer) < TOLERANCE, strategy.name


@pytest.mark.parametrize("strategy", [Strategy(), Strategy(dense="zero_offload")], ids=lambda each: each.name)
def test_what_goes_on_needs_no_more_memory(log: PreparedLog, tmp_path: Path, strategy: Strategy) -> None:
    job = one_pass(log)
    peaks = []
    for runs in (
        lambda: broken_off(job, log, tmp_path, 750, strategy=strategy),
        lambda: run(job, log, Told(), tmp_path, strategy=strategy),
    ):
        # what is looked at below is the count, not the limit
        with limited_memory(2**40, torch.device("cpu")) as peak:
            runs()
            peaks.append(peak())
    fresh, gone_on = peaks
    assert gone_on == pytest.approx(fresh, rel=0.01)


@pytest.mark.parametrize(
    ("examples", "steps", "more"),
    [
        (1100, 25, {}),
        (1350, 29, {"precision": "bf16", "weight_average": 2, "dropout": 0.2, "clip_norm": 0.1}),
    ],
    ids=["after losses are looked at", "after an evaluation"],
)
def test_delayed_updates_go_on_to_the_bit(
    log: PreparedLog,
    tmp_path: Path,
    undisturbed_by: Undisturbed,
    more: dict[str, Any],
    examples: int,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From an evaluation, and from a checkpoint between two, which changes nothing."""
    monkeypatch.setattr(zero_offload, "DELAY_AFTER", 7)
    strategy = Strategy(dense="zero_offload")
    job = job_of(log, evaluate_every=1200, delayed_update=True, **more)
    undisturbed = undisturbed_by(job, strategy=strategy)
    broken_off(job, log, tmp_path, examples, strategy=strategy)
    assert newest_steps(tmp_path) == steps
    assert_same(run(job, log, Told(), tmp_path, strategy=strategy), undisturbed)
    if not more:
        at_once = undisturbed_by(job_of(log, evaluate_every=1200), strategy=strategy)
        assert gap(at_once.answer, undisturbed.answer) > 1e-6


def test_delayed_updates_are_refused_where_nothing_delays_them(log: PreparedLog) -> None:
    job = job_of(log, delayed_update=True)
    for strategy in (Strategy(), Strategy(checkpointing="full")):
        with pytest.raises(
            UserError, match=r"delayed_update=true is planned with zero_offload.*Give technique=zero_off"
        ):
            run(job, log, Told(), None, strategy=strategy)


def test_learning_rates_fall_as_half_a_cosine(log: PreparedLog) -> None:
    """After a warm-up that is said as a share of all passes."""
    job = job_of(log, epochs=1, schedule="cosine", warmup_share=0.1)
    rows = log.split("train").rows
    curve = run(job, log, Told(), None).points
    shares = [(point["examples"] - BATCH) / rows for point in curve]  # before each evaluation's last step
    assert [point["learning_rate"] for point in curve] == pytest.approx(
        [5e-4 * 0.5 * (1 + math.cos(math.pi * share)) for share in shares]
    )


def test_short_trainings_make_none(log: PreparedLog, tmp_path: Path) -> None:
    told, folder = Told(), tmp_path / "checkpoints"
    train(one_pass(log), log, told, keep=told.weights.update, progress_seconds=9.0, resume_from=folder)
    assert not folder.exists()


def test_best_weights_are_written_once(log: PreparedLog, tmp_path: Path) -> None:
    """And lie in every checkpoint."""
    seen = set()

    class Looking(Told):
        def __call__(self, event: Event) -> None:
            seen.update((path / BEST).stat().st_ino for path in made(tmp_path) if (path / BEST).exists())
            super().__call__(event)

    told = run(job_of(log), log, Looking(), tmp_path)
    nes = [point["validation"]["ne"] for point in told.points]
    improved = sum(ne < min(nes[:place], default=math.inf) for place, ne in enumerate(nes))
    assert 1 <= len(seen) <= improved


def test_best_weights_are_copied_where_a_file_system_has_no_hard_links(
    log: PreparedLog, tmp_path: Path, undisturbed_by: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    job = job_of(log)
    broken_off(job, log, tmp_path, 1250)
    assert run(job, log, Told(), tmp_path).answer == undisturbed_by(job).answer


def test_what_a_killed_one_left_half_written_does_no_harm(log: PreparedLog, tmp_path: Path) -> None:
    half = tmp_path / f".{PREFIX}999.partial"
    half.mkdir()
    (half / "part").touch()
    broken_off(job_of(log), log, tmp_path, 750)
    assert not half.exists()
    assert len(made(tmp_path)) == KEPT


def test_a_checkpoint_of_another_job_is_refused(log: PreparedLog, interrupted: Path) -> None:
    with pytest.raises(UserError, match="of another job"):
        run(job_of(log, learning_rate=0.5), log, Told(), interrupted)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """One bit, in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("name", "harm"), [("__0_0.distcp", halve), (STANDS, Path.unlink)])
def test_the_checkpoint_before_a_damaged_one_is_used(
    log: PreparedLog,
    checkpoints: Path,
    undisturbed_by: Undisturbed,
    caplog: pytest.LogCaptureFixture,
    name: str,
    harm: Callable[[Path], None],
) -> None:
    job = job_of(log)
    before, newest = in_order(checkpoints)
    harm(newest / name)
    with caplog.at_level("INFO"):
        assert run(job, log, Told(), checkpoints).answer == undisturbed_by(job).answer
    assert (
        f"{newest} was damaged and is removed: training goes on from the one before, {before.name}"
        in caplog.text
    )
    assert f"goes on from {before}, made by 1 rank(s)" in caplog.text


def test_a_flipped_bit_of_any_file_is_found(interrupted: Path, tmp_path: Path) -> None:
    """And one that is cut short or gone."""
    newest = in_order(interrupted)[-1]
    assert damage(newest, Ranks()) is None
    for name in [path.name for path in newest.iterdir()]:
        for harm in (flip, halve, Path.unlink):
            copy = tmp_path / f"{name} {harm.__name__}"
            shutil.copytree(newest, copy)
            harm(copy / name)
            assert damage(copy, Ranks()) is not None, copy.name


def test_without_a_whole_checkpoint_training_begins_anew(
    log: PreparedLog, checkpoints: Path, undisturbed_by: Undisturbed, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(log)
    for checkpoint in made(checkpoints):
        halve(checkpoint / "__0_0.distcp")
    assert run(job, log, Told(), checkpoints).answer == undisturbed_by(job).answer
    assert "__0_0.distcp is not what was written" in caplog.text
    assert "was damaged and is removed: training begins anew" in caplog.text


def in_order(folder: Path) -> list[Path]:
    return sorted(made(folder), key=lambda path: int(path.name.removeprefix(PREFIX)))


def only_one(folder: Path) -> Path:
    """The newest checkpoint; the one before is gone."""
    before, newest = in_order(folder)
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
    log: PreparedLog, checkpoints: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """In place of the index, in the place of DCP's own index, and in place of the tensors."""
    newest, proof = only_one(checkpoints), tmp_path / "proof"
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
            run(job_of(log), log, Told(), checkpoints)
    else:
        broken_off(job_of(log), log, checkpoints, 0)
        assert "was damaged and is removed: training begins anew" in caplog.text
    assert not proof.exists()
    pickle.loads(pickle.dumps(Planted(proof)))  # it would have
    assert proof.exists()


def test_an_index_cannot_point_outside_its_checkpoint(
    log: PreparedLog, checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = only_one(checkpoints)
    index = newest / "index.json"
    index.write_text(index.read_text().replace('"file":"', '"file":"../'))
    write_manifest(newest, {})
    broken_off(job_of(log), log, checkpoints, 0)
    assert "String should match pattern" in caplog.text
    assert "was damaged and is removed: training begins anew" in caplog.text


def test_a_process_that_is_killed_while_it_removes_checkpoints_leaves_no_half_of_one(
    log: PreparedLog, checkpoints: Path, undisturbed_by: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(log)

    def killed(path: Path, **_: object) -> None:
        if path.exists():
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(Interrupted):
            Checkpoints(checkpoints, job, Ranks(), 0.0).drop()
    assert len(made(checkpoints)) == KEPT - 1
    assert run(job, log, Told(), checkpoints).answer == undisturbed_by(job).answer


def test_checkpoints_by_the_clock_change_nothing_where_embeddings_decay(
    log: PreparedLog, tmp_path: Path, undisturbed_by: Undisturbed
) -> None:
    """Rows decay when they are read; a checkpoint has all of them up to date, at moments that the steps decide."""
    for precision in ("fp32", "fp16"):
        rates = {"table_decay": 0.02, "table_precision": precision}
        job = job_of(log, batch_size=9, epochs=1, evaluate_every=2400, **rates)
        undisturbed, folder = undisturbed_by(job), tmp_path / precision
        assert run(job, log, Told(), folder).answer == undisturbed.answer
        broken_off(job, log, folder, 950)
        assert newest_steps(folder) == 100
        assert run(job, log, Told(), folder).answer == undisturbed.answer


def test_killed_at_any_moment(
    log: PreparedLog, shared: Path, tmp_path: Path, undisturbed_by: Undisturbed
) -> None:
    """SIGKILL, twice, the second time after more training."""
    rng, undisturbed = random.Random(0), undisturbed_by(job_of(log, dropout=0.2)).answer
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
    told = run(job_of(log, dropout=0.2), log, Told(), folder)
    (folder / "alone.json").write_text(json.dumps(told.answer))


def newest_steps(folder: Path) -> int:
    return max((int(path.name.removeprefix(PREFIX)) for path in made(folder)), default=-1)


# on several ranks


def one_pass(log: PreparedLog) -> Job:
    """With an average of weights, which each rank holds its part of."""
    return job_of(log, epochs=1, schedule="constant", weight_average=2)


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
    """Interrupted under plain DP at half; from there under each strategy."""
    ranks, more, log = several(shared)
    job, folder, found = one_pass(log), shared / "interrupted", {}
    broken_off(job, log, folder, 750, **more)
    dist.barrier()
    for strategy in ON_FOUR:
        copy = copied(folder, strategy.name, ranks)
        resumed = run(job, log, Told(), copy, strategy=strategy, **more)
        found[strategy.name] = {"resumed": resumed.answer, "left": len(made(copy))}
    return found


def killed(shared: Path) -> None:
    """The last rank kills itself."""
    ranks, more, log = several(shared)

    def die() -> None:
        if ranks.rank == ranks.world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)

    run(one_pass(log), log, Told(at=750, then=die), shared / "killed", **more)


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
    job, found = one_pass(log), {}
    for strategy in ON_TWO:
        copy = copied(shared / "interrupted", f"{strategy.name} on two", ranks)
        model = build_model(job.model, job.features)
        step = DistributedStep(model, job, strategy, ranks, more["cluster"], where=torch.device("cpu"))
        off = off_from_best(step, job, copy, ranks)
        resumed = run(job, log, Told(), copy, strategy=strategy, **more)
        found[strategy.name] = {"resumed": resumed.answer, "off": off}
    if ranks.first:  # the newest is damaged, too, where another rank looks
        halve(in_order(shared / "killed")[-1] / "__1_0.distcp")
    dist.barrier()
    found["killed"] = {"resumed": run(job, log, Told(), shared / "killed", **more).answer}
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
def test_four_ranks_go_on(on_four: dict[str, Any], log: PreparedLog, undisturbed_by: Undisturbed) -> None:
    """As one rank does that nothing disturbs."""
    for strategy in ON_FOUR:
        found = on_four[strategy.name]
        assert gap(found["resumed"], undisturbed_by(one_pass(log)).answer) < TOLERANCE, strategy.name
        assert found["left"] == 0


@needs("torchrec")
def test_two_ranks_go_on_from_four_and_after_one_was_killed(
    on_two: dict[str, Any], log: PreparedLog, undisturbed_by: Undisturbed
) -> None:
    for name, found in on_two.items():
        assert gap(found["resumed"], undisturbed_by(one_pass(log)).answer) < TOLERANCE, name
        assert found.get("off", 0.0) == 0.0, name


@needs("torchrec")
def test_one_rank_goes_on_from_four(
    log: PreparedLog, shared: Path, on_four: dict[str, Any], undisturbed_by: Undisturbed
) -> None:
    copy, job = Path(shutil.copytree(shared / "interrupted", shared / "for one")), one_pass(log)
    step = TrainStep(build_model(job.model, job.features), job.training)
    assert off_from_best(step, job, copy) == 0.0
    assert gap(run(job, log, Told(), copy).answer, undisturbed_by(job).answer) < TOLERANCE
