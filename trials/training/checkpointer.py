"""Checkpoints of a training that is under way, through `torch.distributed.checkpoint`, and going on from one.

A checkpoint is a folder that is whole or not there: weights, optimizer state and tables as each rank holds
them (`trials.training.checkpoint_files`, `trials.training.embeddings.blocks`), where the training stands,
random number generators, the best weights so far. It loads under another strategy and on another number of
ranks. The newest is kept, and the one before, for the case that the newest is not as it was written
(`trials.training.checkpoint_files`). Reading one runs nothing that is written in it
(`trials.training.checkpoint_files`).
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dhen.errors import UserError
from dhen.values import Value
from trials.records.job import Job
from trials.records.places import PREFIX, checkpoints_in, steps_of
from trials.records.strategy import Ranks
from trials.records.trial_record import CurvePoint, Metrics
from trials.store.user_cache import disk_full, is_disk_full
from trials.store.weights import OPTIMIZER, Weights, read_all, save_weights
from trials.training.checkpoint_files import (
    FlatPieces,
    IndexedReader,
    IndexedWriter,
    VectorLoadPlanner,
    VectorSavePlanner,
    damage,
    write_manifest,
    written_hashes,
)
from trials.training.embeddings.blocks import State, sums_of
from trials.training.embeddings.growing import PROGRESS, TABLE_WEIGHTS
from trials.training.memory_limit import on_host
from trials.training.process_group import all_agree, as_first
from trials.training.step import Step, WeightAverage

# Where a training stands between two steps, but for weights: what a checkpoint needs to go on with.


class TrainingState(BaseModel):
    """The state that a training carries from step to step and changes."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    examples: int = 0
    steps: int = 0
    next_evaluation: int
    """Number of examples from which on an evaluation is due."""
    loss_sum: float = 0.0
    loss_steps: int = 0
    """Number of steps since the last evaluation whose losses were looked at."""
    clipped_steps: int = 0
    """Number of these steps whose gradients were clipped."""
    curve: list[CurvePoint] = []
    best: Metrics | None = None
    best_examples: int = 0
    """Training examples seen when the best weights were evaluated."""
    stale: int = 0
    """Number of evaluations in a row without a better NE."""
    seconds: float = 0.0
    """Seconds of training and evaluation so far, noted where a checkpoint is made."""
    evaluate_seconds: float = 0.0
    rate_factor: float = 1.0
    """Factor of the learning rates that plateaus have left."""
    speeds: list[float] = []
    """Examples per second in each stretch between evaluations."""

    def evaluations(self, every: int) -> int:
        """Returns how many evaluations, one every so many examples, lie behind; a refit has only passed them."""
        return self.next_evaluation // every - 1


LOG = logging.getLogger(__name__)
CHECKPOINT_SECONDS = 30.0
"""Seconds of training that may be lost: once so many have passed, an evaluation is followed by a checkpoint."""
LATEST = 4
"""Multiple of `CHECKPOINT_SECONDS` after which a checkpoint no longer waits for an evaluation."""
COST_SHARE = 0.02
"""Share of a training's seconds that checkpoints may take: slow ones are made less often."""
KEPT = 2
"""Number of checkpoints that are kept: the newest, and the one before."""
STANDS, BEST = "training.json", "best.safetensors"
DENSE, TABLES, RANDOM, RANDOM_CUDA = "dense.", "tables.", "random.", "random_cuda."
AVERAGED = "averaged{}."
"""Prefix of the names of earlier weights, which an average is made of."""


class CheckpointInfo(Value):
    """What the file `training.json` of a checkpoint says of the training."""

    job: str
    """Fingerprint of the job."""
    ranks: int
    tensor: int = Field(default=1, exclude_if=lambda degree: degree == 1)
    """Tensor parallel degree; ranks of a tensor group draw the same random numbers."""
    training: TrainingState


class Checkpoints:
    """The checkpoints of one training, in one folder; every rank makes the same calls in the same order."""

    def __init__(
        self,
        folder: Path | None,
        job: Job,
        ranks: Ranks,
        seconds: float = CHECKPOINT_SECONDS,
    ) -> None:
        """The checkpoints of a training of `job`.

        Args:
            folder: where they are kept; None if none are wanted.
            job: what is trained.
            ranks: the ranks that train it.
            seconds: seconds of training that may be lost.
        """
        self._folder, self._job, self._ranks, self._every = folder, job, ranks, seconds
        self._last = time.perf_counter()
        self.count, self.seconds = 0, 0.0
        """Number of checkpoints made so far, and the seconds that they took."""
        self.newest_steps = 0
        """Number of steps that the newest one is made after; 0 if there is none."""

    def due(self, *, evaluated: bool) -> bool:
        """Tells whether to make a checkpoint now, by rank 0's clock; a collective."""
        if self._folder is None:
            return False
        wait = self._every * (1 if evaluated else LATEST)
        if wait and self.count:
            wait = max(wait, self.seconds / self.count / COST_SHARE)
        (yes,) = as_first(self._ranks, [float(time.perf_counter() - self._last >= wait)])
        return bool(yes)

    def save(
        self,
        step: Step,
        state: TrainingState,
        best: Weights | None,
        average: WeightAverage | None = None,
    ) -> float:
        """Makes a checkpoint; the best weights are rank 0's. Returns the seconds that saving took."""
        assert self._folder is not None
        began = time.perf_counter()
        name = f"{PREFIX}{state.steps}"
        partial = self._folder / f".{name}.partial"
        if self._ranks.first:
            for leftover in self._folder.glob(f".{PREFIX}*.partial"):  # a process was killed while it wrote
                shutil.rmtree(leftover)
            partial.mkdir(parents=True)
        as_first(self._ranks, [0.0])  # the folder is there
        step.save_tables(partial)
        try:
            with on_host():
                state_dict = _state(step.dense_state(), step.table_state()) | _random(self._ranks)
                for number, weights in enumerate(average.state() if average is not None else ()):
                    state_dict |= _state(*weights, prefix=AVERAGED.format(number))
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", ".*intent is to save in a single process", UserWarning)
                    writer, planner = IndexedWriter(partial), VectorSavePlanner()
                    save(
                        state_dict, storage_writer=writer, planner=planner, no_dist=not dist.is_initialized()
                    )
        except CheckpointException as error:  # a BaseException, which says more than a rank can pass on
            if is_disk_full(error):
                raise disk_full(self._folder) from error
            raise RuntimeError(f"{partial}: the checkpoint could not be written: {error}") from error
        if self._ranks.first:
            self._write_rest(partial, step, state, best)
            os.replace(partial, self._folder / name)
            self._drop_all_but(KEPT)
        self._last = time.perf_counter()
        self.count, self.newest_steps = self.count + 1, state.steps
        self.seconds += self._last - began
        LOG.info("%s written in %.2f s", self._folder / name, self._last - began)
        return self._last - began

    def restore(
        self, step: Step, average: WeightAverage | None = None
    ) -> tuple[TrainingState, Weights | None] | None:
        """Puts the newest checkpoint into a fresh step and the random number generators; None if there is none.

        One that is not as it was written is said in the log and removed, and the one before takes its place;
        without one before, training begins anew.

        The earlier weights that an average is made of are put into the step first, one after another, for
        `average` to note.

        On another number of ranks, or under another tensor parallel degree, dropout goes on with random numbers of
        its own.

        Raises:
            UserError: if the checkpoint is another job's, or cannot be read though it is as it was written.
        """
        newest = self._newest_whole()
        if newest is None:
            step.go_on_with_tables(0, None)
            return None
        try:
            stand = CheckpointInfo.model_validate_json((newest / STANDS).read_bytes())
        except (OSError, ValidationError) as error:
            raise UserError(
                f"{newest}: no readable checkpoint ({error}). Delete it, and training begins anew; ranks on "
                "several hosts need a folder that all of them see."
            ) from None
        if stand.job != self._job.fingerprint:
            raise UserError(
                f"{newest} is a checkpoint of another job ({stand.job}; this one is {self._job.fingerprint}): "
                "model, log, training and seed must be the same. Name another folder, or delete it."
            )
        LOG.info("goes on from %s, made by %d rank(s)", newest, stand.ranks)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*intent is to load in a single process", UserWarning)
            if average is not None:
                evaluations = stand.training.evaluations(self._job.evaluate_every)
                for earlier in range(min(evaluations, self._job.weight_average)):
                    step.restored(self._read(newest, step, AVERAGED.format(earlier)), stand.training.steps)
                    average.note()
            tables = self._read(newest, step)
        step.go_on_with_tables(stand.training.steps, newest)
        step.restored(tables, stand.training.steps)
        tensor = step.strategy.tensor
        if (stand.ranks, stand.tensor) != (self._ranks.world, tensor):
            torch.manual_seed(hash((self._job.seed, stand.training.steps, self._ranks.rank // tensor)))
        best = newest / BEST
        self._last, self.newest_steps = time.perf_counter(), stand.training.steps
        if not best.exists():
            return stand.training, None
        with on_host():  # as they are when an evaluation keeps them, on the first rank alone
            return stand.training, read_all(best) if self._ranks.first else {}

    def drop(self) -> None:
        """Removes all checkpoints, when the training has ended."""
        if self._folder is not None and self._ranks.first:
            self._drop_all_but(0)

    def _read(self, path: Path, step: Step, weights: str = "") -> State:
        """Loads a checkpoint. `weights` is the prefix of the names to read in place of the newest weights."""
        try:
            reader = IndexedReader(path)
            saved = reader.read_metadata().state_dict_metadata
            tables = step.table_state({key.removeprefix(TABLES) for key in saved if key.startswith(TABLES)})
            random = {name: tensor for name, tensor in _random(self._ranks).items() if name in saved}
            names = {key.removeprefix(DENSE) for key in saved if key.startswith(DENSE)}
            of_weights = f"{DENSE}weight", *(f"{TABLES}{name}" for name in TABLE_WEIGHTS)
            state = {
                f"{weights}{key}" if key == of_weights[0] or key.startswith(of_weights[1:]) else key: value
                for key, value in (_state(step.dense_state(names), tables) | random).items()
            }
            planner = VectorLoadPlanner()
            load(state, storage_reader=reader, planner=planner, no_dist=not dist.is_initialized())
        except (CheckpointException, OSError, ValueError) as error:
            reason = " ".join(str(error).split())[-300:]
            raise UserError(
                f"{path}: the checkpoint cannot be read ({reason}). Delete it, and training begins anew."
            ) from None
        if (drawn := random.get(f"{RANDOM}{self._ranks.rank}")) is not None:
            torch.set_rng_state(drawn)
        if (drawn := random.get(f"{RANDOM_CUDA}{self._ranks.rank}")) is not None:
            torch.cuda.set_rng_state(drawn)
        return tables

    def _newest_whole(self) -> Path | None:
        """Returns the newest checkpoint that is as it was written; a collective. All ranks look for what rank 0
        sees: if they do not share a disk, they say what is missing."""
        while self._folder is not None:
            newest = [float(steps_of(path)) for path in checkpoints_in(self._folder)[:1]]
            (steps,) = as_first(self._ranks, newest or [-1.0])
            if steps < 0:
                return None
            path = self._folder / f"{PREFIX}{int(steps)}"
            fault = damage(path, self._ranks)
            if fault is not None:
                LOG.warning("%s is damaged: %s", path, fault)
            if all_agree(self._ranks, fault is None):
                return path
            if self._ranks.first:
                _remove(path)
                before = checkpoints_in(self._folder)[:1]
                goes_on = f"goes on from the one before, {before[0].name}" if before else "begins anew"
                LOG.warning("%s was damaged and is removed: training %s", path, goes_on)
            as_first(self._ranks, [0.0])  # it is gone for all
        return None

    def _write_rest(self, partial: Path, step: Step, state: TrainingState, best: Weights | None) -> None:
        """Writes where the training stands, the best weights and the manifest; best weights are written once, and
        linked to from then on."""
        ranks, tensor = self._ranks.world, step.strategy.tensor
        stand = CheckpointInfo(job=self._job.fingerprint, ranks=ranks, tensor=tensor, training=state)
        (partial / STANDS).write_text(stand.model_dump_json())
        known = {}
        assert self._folder is not None
        for earlier in checkpoints_in(self._folder) if best is not None else ():
            try:
                stand = CheckpointInfo.model_validate_json((earlier / STANDS).read_bytes())
                hashes = written_hashes(earlier)
            except (OSError, ValueError):
                continue  # it was damaged since
            if stand.training.best_examples == state.best_examples and BEST in hashes:
                try:
                    os.link(earlier / BEST, partial / BEST)
                except OSError:  # of a file system without hard links
                    shutil.copyfile(earlier / BEST, partial / BEST)
                known = {BEST: hashes[BEST]}
                break
        if best is not None and not known:
            save_weights(best, partial / BEST)
        write_manifest(partial, known)

    def _drop_all_but(self, count: int) -> None:
        assert self._folder is not None
        for path in checkpoints_in(self._folder)[count:]:
            _remove(path)


def _remove(path: Path) -> None:
    """Removes a checkpoint; a process that is killed meanwhile leaves no half of one."""
    leaving = path.with_name(f".{path.name}.partial")
    shutil.rmtree(leaving, ignore_errors=True)
    path.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def _state(dense: dict[str, FlatPieces], tables: State, prefix: str = "") -> dict[str, Tensor | FlatPieces]:
    """Returns dense state and tables by their names in a checkpoint."""
    named = {f"{prefix}{DENSE}{name}": pieces for name, pieces in dense.items()}
    return {**named, **{f"{prefix}{TABLES}{name}": tensor for name, tensor in tables.items()}}


def _random(ranks: Ranks) -> dict[str, Tensor]:
    """Returns the states of this rank's random number generators."""
    states = {f"{RANDOM}{ranks.rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{RANDOM_CUDA}{ranks.rank}"] = torch.cuda.get_rng_state()
    return states


# Optimizer state beside weights in their file, in the form of one process: what goes on learning begins with it.
#
# Names begin with `optimizer.`: `dense.exp_avg` and the like are vectors over all dense weights in the order of
# `named_parameters`, `tables.sum.TABLE.FIRST-LAST` row-wise Adagrad's sums by row, `tables.PROGRESS` and so on
# what growing tables have counted, `steps` the number of training steps. However a model is held, its state is
# gathered into this form and put back from it. Weights are not part of it: they have a form of their own.
#
# Without it, Adagrad's first update of a row is as large as if nothing had been learnt (docs/log.md).

STEPS = f"{OPTIMIZER}steps"
SUM, COUNTED = "sum.", f"{PROGRESS}."


def optimizer_state(step: Step, steps: int, ranks: Ranks) -> Weights:
    """Returns a copy of a step's optimizer state after so many steps, on the first rank, empty on others; a
    collective."""
    with on_host():
        dense = step.dense_moments(steps)
        held = {name: [(start, values.cpu()) for start, values in one.pieces] for name, one in dense.items()}
        table_state = step.table_state().items()
        tables = {name: t.cpu() for name, t in table_state if name.startswith((SUM, COUNTED))}
        of_ranks: list[Any] = [(held, tables)]
        if ranks.world > 1:
            of_ranks = [None] * ranks.world
            dist.gather_object((held, tables), of_ranks if ranks.first else None)
        if not ranks.first:
            return {}
        found: Weights = {STEPS: torch.tensor(steps)}
        for name, one in dense.items():
            whole = torch.empty(one.length)
            for start, values in (piece for held, _ in of_ranks for piece in held[name]):
                whole[start : start + len(values)] = values
            found[f"{OPTIMIZER}{DENSE}{name}"] = whole
        for _, tables in of_ranks:
            found |= {f"{OPTIMIZER}{TABLES}{name}": values.clone() for name, values in tables.items()}
        return found


def put_back(step: Step, saved: Weights, ranks: Ranks) -> None:
    """Puts optimizer state, which the first rank has, into a step that has the weights already; does nothing if
    there is none. A collective."""
    if ranks.world > 1:
        given: list[Weights] = [saved]
        dist.broadcast_object_list(given)
        (saved,) = given
    if not saved:
        return
    with on_host(), torch.no_grad():
        for name, one in step.dense_moments(int(saved[STEPS])).items():
            whole = saved[f"{OPTIMIZER}{DENSE}{name}"]
            for start, values in one.pieces:
                values.copy_(whole[start : start + len(values)])
        own, given_tables = step.table_state(), table_part(saved)
        for name, values in own.items():
            if name.startswith(SUM):
                values.copy_(sums_of(given_tables, name.removeprefix(SUM)))
            elif name.startswith(COUNTED):
                values.copy_(given_tables[name])
        step.restored(own, int(saved[STEPS]))


def table_part(saved: Weights) -> State:
    """Returns what of an optimizer state is of the tables, by the names that `put_back` knows a step's by."""
    prefix = f"{OPTIMIZER}{TABLES}"
    return {name.removeprefix(prefix): one for name, one in saved.items() if name.startswith(prefix)}
