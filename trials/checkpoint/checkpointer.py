"""Checkpoints of a training that is under way, through `torch.distributed.checkpoint`, and going on from one.

A checkpoint is a folder that is whole or not there: weights, optimizer state and tables as each rank holds
them (`trials.checkpoint.dcp_vectors`, `trials.embeddings.blocks`), where the training stands, random number
generators, the best weights so far. It loads under another strategy and on another number of ranks. Only the
newest is kept. Reading one runs nothing that is written in it (`trials.checkpoint.index_file`).
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dhen.errors import UserError
from dhen.values import Value
from trials.checkpoint.dcp_vectors import FlatPieces, LoadPlanner, SavePlanner
from trials.checkpoint.index_file import IndexedReader, IndexedWriter
from trials.checkpoint.training_state import TrainingState
from trials.collectives import as_first
from trials.embeddings.blocks import State
from trials.job import Job
from trials.memory.limit import on_host
from trials.ranks import Ranks
from trials.storage.weights_file import Weights, read_weights, save_weights

LOG = logging.getLogger(__name__)
CHECKPOINT_SECONDS = 30.0
"""Of training that may be lost: after so much an evaluation is followed by a checkpoint."""
LATEST = 4
"""Times that, after which none is waited for."""
COST_SHARE = 0.02
"""Of a training's seconds that checkpoints may take: slow ones are made less often."""
PREFIX, STANDS, BEST = "after-", "training.json", "best.safetensors"
DENSE, TABLES, RANDOM, RANDOM_CUDA = "dense.", "tables.", "random.", "random_cuda."
AVERAGED = "averaged{}."
"""What the names of earlier weights begin with, which an average is of."""


class Resumable(Protocol):
    """A training step that can be saved."""

    def dense_state(self) -> dict[str, FlatPieces]:
        """Of this rank; loading into it is loading."""

    def table_state(self, saved: Collection[str] | None = None) -> State:
        """Of this rank, to save; to load, what it needs of a checkpoint that has these keys."""

    def restored(self, tables: State, steps: int) -> None:
        """After what the two gave was loaded into."""


class Average(Protocol):
    """A mean of weights that the step had earlier."""

    def state(self) -> Iterator[tuple[FlatPieces, State]]:
        """The dense weights and the tables' blocks of each in the mean, oldest first."""

    def note(self) -> None:
        """Takes the step's weights, as they are now, into the mean."""


class CheckpointInfo(Value):
    """Where a training stands, as a file."""

    job: str
    """Fingerprint."""
    ranks: int
    training: TrainingState


class Checkpoints:
    """Those of one training, in one folder; every rank makes the same calls in the same order."""

    def __init__(self, folder: Path | None, job: Job, ranks: Ranks, seconds: float = CHECKPOINT_SECONDS):
        """`folder`: None for no checkpoints. `seconds`: of training that may be lost; 0 for as few as can be."""
        self._folder, self._job, self._ranks, self._every = folder, job, ranks, seconds
        self._last = time.perf_counter()
        self.count, self.seconds = 0, 0.0
        """Made so far, and what that took."""

    def due(self, *, evaluated: bool) -> bool:
        """Whether to make one now, by rank 0's clock; a collective."""
        if self._folder is None:
            return False
        wait = self._every * (1 if evaluated else LATEST)
        if wait and self.count:
            wait = max(wait, self.seconds / self.count / COST_SHARE)
        (yes,) = as_first(self._ranks, [float(time.perf_counter() - self._last >= wait)])
        return bool(yes)

    def save(
        self,
        step: Resumable,
        state: TrainingState,
        best: Weights | None,
        average: Average | None = None,
    ) -> float:
        """Replaces the newest; the best weights are rank 0's. Returns the seconds it took."""
        assert self._folder is not None
        began = time.perf_counter()
        name = f"{PREFIX}{state.steps}"
        partial = self._folder / f".{name}.partial"
        if self._ranks.first:
            for left in self._folder.glob(f".{PREFIX}*.partial"):  # by one that was killed
                shutil.rmtree(left)
            partial.mkdir(parents=True)
        as_first(self._ranks, [0.0])  # the folder is there
        with on_host():
            _write(_everything(step, self._ranks) | _averaged(average), partial)
        if self._ranks.first:
            self._write_rest(partial, state, best)
            os.replace(partial, self._folder / name)
            self._keep_only(name)
        self._last = time.perf_counter()
        self.count += 1
        self.seconds += self._last - began
        LOG.info("%s written in %.2f s", self._folder / name, self._last - began)
        return self._last - began

    def restore(
        self, step: Resumable, average: Average | None = None
    ) -> tuple[TrainingState, Weights | None] | None:
        """Puts the newest checkpoint into a fresh step and the random number generators; None where there is none.

        What an average is of is put into the step first, one after another, for `average` to note.

        On another number of ranks, dropout goes on with random numbers of its own.

        Raises:
            UserError: where it is another job's, or damaged.
        """
        newest = self._newest()
        if newest is None:
            return None
        stand = self._stand(newest)
        LOG.info("goes on from %s, made by %d rank(s)", newest, stand.ranks)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*intent is to load in a single process", UserWarning)
            for earlier in range(min(len(stand.training.curve), self._job.training.weight_average)):
                assert average is not None
                step.restored(self._read(newest, step, AVERAGED.format(earlier)), stand.training.steps)
                average.note()
            tables = self._read(newest, step)
        step.restored(tables, stand.training.steps)
        if stand.ranks != self._ranks.world:
            torch.manual_seed(hash((self._job.seed, stand.training.steps, self._ranks.rank)))
        best = newest / BEST
        self._last = time.perf_counter()
        return stand.training, read_weights(best) if self._ranks.first and best.exists() else None

    def drop(self) -> None:
        """Removes them, when the training has ended."""
        if self._folder is not None and self._ranks.first:
            self._keep_only(None)

    def _read(self, path: Path, step: Resumable, weights: str = "") -> State:
        """`weights`: what the names begin with of those to be read, in place of the newest's."""
        try:
            reader = IndexedReader(path)
            saved = reader.read_metadata().state_dict_metadata
            tables = step.table_state({key.removeprefix(TABLES) for key in saved if key.startswith(TABLES)})
            random = {name: tensor for name, tensor in _random(self._ranks).items() if name in saved}
            dense = {f"{DENSE}{name}": pieces for name, pieces in step.dense_state().items()}
            state = dense | {f"{TABLES}{name}": tensor for name, tensor in tables.items()} | random
            state = {f"{weights}{key}" if _is_weight(key) else key: held for key, held in state.items()}
            load(state, storage_reader=reader, planner=LoadPlanner(), no_dist=_alone())
        except (CheckpointException, OSError, ValueError) as error:
            reason = " ".join(str(error).split())[-300:]
            raise UserError(
                f"{path}: the checkpoint cannot be read ({reason}). Delete it, and training begins anew."
            ) from None
        _set_random(random, self._ranks)
        return tables

    def _newest(self) -> Path | None:
        """As rank 0 sees it: where ranks do not share a disk, all say what is missing."""
        found = _made(self._folder) if self._folder is not None else []
        (steps,) = as_first(self._ranks, [float(max((_steps(path) for path in found), default=-1))])
        if steps < 0:
            return None
        assert self._folder is not None
        return self._folder / f"{PREFIX}{int(steps)}"

    def _stand(self, path: Path) -> CheckpointInfo:
        try:
            stand = CheckpointInfo.model_validate_json((path / STANDS).read_bytes())
        except (OSError, ValidationError) as error:
            raise UserError(
                f"{path}: no readable checkpoint ({error}). Delete it, and training begins anew; ranks on several "
                "hosts need a folder that all of them see."
            ) from None
        if stand.job != self._job.fingerprint:
            raise UserError(
                f"{path} is a checkpoint of another job ({stand.job}; this one is {self._job.fingerprint}): "
                "model, log, training and seed must be the same. Name another folder, or delete it."
            )
        return stand

    def _write_rest(self, partial: Path, state: TrainingState, best: Weights | None) -> None:
        """The best weights are written once, and linked to from then on."""
        stand = CheckpointInfo(job=self._job.fingerprint, ranks=self._ranks.world, training=state)
        (partial / STANDS).write_text(stand.model_dump_json())
        if best is None:
            return
        assert self._folder is not None
        for path in _made(self._folder):
            if self._stand(path).training.best_examples == state.best_examples and (path / BEST).exists():
                os.link(path / BEST, partial / BEST)
                return
        save_weights(best, partial / BEST)

    def _keep_only(self, name: str | None) -> None:
        assert self._folder is not None
        for path in _made(self._folder):
            if path.name != name:
                shutil.rmtree(path, ignore_errors=True)


def _made(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]


def _steps(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def _everything(step: Resumable, ranks: Ranks) -> dict[str, Tensor | FlatPieces]:
    dense = {f"{DENSE}{name}": pieces for name, pieces in step.dense_state().items()}
    return {**dense, **{f"{TABLES}{name}": t for name, t in step.table_state().items()}, **_random(ranks)}


def _averaged(average: Average | None) -> dict[str, Tensor | FlatPieces]:
    found: dict[str, Tensor | FlatPieces] = {}
    for number, (dense, blocks) in enumerate(average.state() if average is not None else ()):
        prefix = AVERAGED.format(number)
        found[f"{prefix}{DENSE}weight"] = dense
        found |= {f"{prefix}{TABLES}{name}": tensor for name, tensor in blocks.items()}
    return found


def _is_weight(key: str) -> bool:
    return key == f"{DENSE}weight" or key.startswith(f"{TABLES}weight.")


def _write(state: dict[str, Tensor | FlatPieces], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*intent is to save in a single process", UserWarning)
        writer = IndexedWriter(folder)
        save(state, storage_writer=writer, planner=SavePlanner(), no_dist=_alone())


def _alone() -> bool:
    return not dist.is_initialized()


def _random(ranks: Ranks) -> dict[str, Tensor]:
    """The states of this rank's generators."""
    found = {f"{RANDOM}{ranks.rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        found[f"{RANDOM_CUDA}{ranks.rank}"] = torch.cuda.get_rng_state()
    return found


def _set_random(states: dict[str, Tensor], ranks: Ranks) -> None:
    if (state := states.get(f"{RANDOM}{ranks.rank}")) is not None:
        torch.set_rng_state(state)
    if (state := states.get(f"{RANDOM_CUDA}{ranks.rank}")) is not None:
        torch.cuda.set_rng_state(state)
