"""Online training: each period of a log is scored before it is trained on, and leaves an increment.

The bundle in `out` holds three states of one network: as it was when online training began (frozen), its newest
version (served), and what trains. The served one predicts a period that nobody has trained on; then the period's
rows are trained on once, in the order of time; what has changed becomes an increment, which is applied to the
served one as any reader would. A checkpoint precedes the increment, so that whatever ends the process, the same
command goes on from the last period that was trained on. Increments are written while the next period is scored.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from dhen.atomic_write import write_atomically
from dhen.errors import UserError
from search.bundles.bundle import Bundle, is_bundle, read_bundle, weights_names
from search.bundles.increments import Increment, IncrementInfo, TrainedPeriod, write_increment
from search.bundles.whole_copy import copy_whole
from search.online.table_servers import TableServers
from trials.checkpoint.checkpointer import Checkpoints
from trials.checkpoint.optimizer_state import STEPS, put_back
from trials.checkpoint.training_state import TrainingState
from trials.cluster.machine import device
from trials.data.cache import PreparedLog
from trials.data.periods import Period, Periods
from trials.job import Job
from trials.record import Metrics
from trials.storage.weight_changes import KEYS, apply_changes, without_rows
from trials.storage.weights_file import Weights, read_optimizer_state
from trials.training.evaluation import logit_metrics, split_logits
from trials.training.progressive import train_once
from trials.training.step import ONE_RANK, PLAIN_DP, DivergenceError, Step, fresh_step

LOG = logging.getLogger(__name__)
CHECKPOINTS = ".online"
"""Folder in the bundle of the checkpoint from which training goes on."""
LATEST = "latest-period.json"
"""File in it that says which period the checkpoint has been trained on last."""


def check_network(bundle: Bundle) -> None:
    """Checks that a bundle is of one network, which can be trained.

    Raises:
        UserError: where it is an average, saying how to take one of its networks, or has tables of 8 bits.
    """
    bundle.check_trainable()
    if bundle.info.members:
        trials = [member.trial for member in bundle.info.members]
        raise UserError(
            f"{bundle.directory} is an average of {len(trials)} networks, and online training goes on with one: "
            f"take one, for example `dhen-search export STUDY --pick {trials[0]} --out NETWORK`, or another "
            "of the study's front."
        )


def opened(source: Bundle, out: Path) -> Bundle:
    """Returns the bundle that is trained: the one in `out`, or a copy of the first there.

    Raises:
        UserError: where `out` is another bundle, or none.
    """
    if not is_bundle(out):
        copy_whole(source, out)
    there = read_bundle(out)
    if there.version.base != source.version.base:
        raise UserError(
            f"{out} is a bundle that does not come from {source.directory} as it is now; choose another --out, or "
            f"go on with what is there: `dhen-search online {out} --data ... --out {out}`."
        )
    return there


class OnlineTraining:
    """The training of a bundle's network, log after log."""

    def __init__(self, bundle: Bundle, job: Job, servers: TableServers | None = None) -> None:
        """Goes on where the bundle stands.

        Args:
            bundle: the bundle that is trained.
            job: the job (`OnlineSettings.job`).
            servers: starts servers that hold the tables; None where this process does.
        """
        self._servers = servers
        self._directory, self._job, self._bundle = bundle.directory, job, bundle
        self.increments = list(bundle.increments)
        """Increments of the bundle, in order."""
        self._version = bundle.version
        self._frozen = dataclasses.replace(bundle, increments=()).model().to(device())
        self._served = bundle.model().to(device())
        self._checkpoints = Checkpoints(bundle.directory / CHECKPOINTS, job, ONE_RANK, 0.0)
        learnt = read_optimizer_state(bundle.directory / weights_names(bundle.info)[0])
        self._before = int(learnt.get(STEPS, 0))
        """Training steps before online training began, where the bundle has the optimizers' state after them."""
        self.optimizers_begin_anew = False
        """Says whether there is no optimizer state to go on with: neither the bundle's, where nothing was trained
        online so far, nor a checkpoint's."""
        self._step, self._state = self._restored(learnt)

    def done(self, periods: Periods) -> int:
        """Returns how many periods of a log have been trained on already.

        Raises:
            UserError: where the log was cut otherwise before, or what is left of it begins before rows that were
                trained on.
        """
        before = self._bundle.info.trained
        trained = [*([before] if before else []), *(one.info.period for one in self.increments)]
        of_log = [one for one in trained if one.log == periods.log.fingerprint]
        if of_log and of_log[0].length != periods.length:
            raise UserError(
                f"{self._directory} has been trained on a part of this log with period={of_log[0].length}, and "
                f"period={periods.length} was given: give the same again, or another --out."
            )
        newest = max((one.last for one in trained if one.last is not None), default=None)
        begins_at = periods.begins_at
        if not of_log and begins_at is not None and newest is not None and begins_at < newest:
            raise UserError(
                f"time goes back: the log begins at {time_of(begins_at)}, and {self._directory} has been "
                f"trained until {time_of(newest)}. Give later rows, or another --out to begin anew."
            )
        done = of_log[-1].number + 1 if of_log else 0
        if 0 < done < len(periods) and of_log[-1] != trained[-1]:
            raise UserError(
                f"time goes back: {self._directory} has been trained on {done} of the {len(periods)} periods of "
                "this log, and on another log since. Give later rows, or another --out to begin anew."
            )
        return done

    def of(self, log: PreparedLog) -> list[Increment]:
        """Returns the increments of a log's periods, in order."""
        return [one for one in self.increments if one.info.period.log == log.fingerprint]

    @property
    def version(self) -> int:
        """Number of the newest version."""
        return self._version.number

    def train(self, periods: Periods, progress: Callable[[int], None]) -> Iterator[Increment]:
        """Trains on the periods that are left, and yields the increment of each; `progress` is told how many rows
        of the log have been trained on.

        Raises:
            UserError: as `done`, and where the training diverges; increments before stay.
        """
        with ThreadPoolExecutor(1) as pool:
            writing: Future[Increment] | None = None
            exported = self._exported()
            for number in range(self.done(periods), len(periods)):
                period = periods[number]
                online, frozen = (
                    self._metrics(net, period, periods.log) for net in (self._served, self._frozen)
                )
                ahead = self._state.steps > exported  # it was trained on before a process ended
                if ahead:
                    self._check_latest(periods.log, number)
                else:
                    try:
                        self._train(period)
                    except DivergenceError:
                        if writing is not None:
                            yield self._written(writing)
                        raise self._diverged(period, number) from None
                if writing is not None:
                    yield self._written(writing)
                if not ahead:
                    self._save(periods.log, number)
                trained = TrainedPeriod(
                    log=periods.log.fingerprint,
                    length=periods.length,
                    number=number,
                    first=period.first,
                    last=period.last,
                    online=online,
                    frozen=frozen,
                    ne_floor=period.ne_floor,
                )
                info, found, scores = self._serve(trained)
                writing = pool.submit(write_increment, self._directory, info, found, scores)
                exported = self._state.steps
                progress(periods.starts[number + 1])
            if writing is not None:
                yield self._written(writing)

    def _exported(self) -> int:
        """Returns after how many steps the newest increment was made, those before online training included."""
        return self._before + (self.increments[-1].info.steps if self.increments else 0)

    def _restored(self, learnt: Weights) -> tuple[Step, TrainingState]:
        """Returns what trains, as it was after the newest increment, or after a period whose increment was not
        written any more. Optimizer state is the checkpoint's, else the bundle's, or fresh where there is none."""
        exported = self._exported()
        fresh = TrainingState(next_evaluation=0, steps=exported)
        learnt = {} if self.increments else learnt
        step = self._fresh(learnt)
        put_back(step, learnt, ONE_RANK)
        restored = self._checkpoints.restore(step)
        state, _ = restored or (fresh, None)
        self.optimizers_begin_anew = restored is None and (bool(self.increments) or not self._before)
        if state.steps < exported:
            LOG.warning("the checkpoint is older than the newest increment: optimizers begin anew")
            step, state = self._fresh({}), fresh
            self.optimizers_begin_anew = True
        if state.steps == exported:
            step.nothing_changed()
        return step, state

    def _fresh(self, learnt: Weights) -> Step:
        """Returns a step with the weights of the newest version; servers have optimizer state of tables too."""
        start = {name: tensor.cpu() for name, tensor in self._served.state_dict().items()}
        if self._servers is None:
            return fresh_step(self._job, start, ONE_RANK, PLAIN_DP, None)
        servers = self._servers.start(start, learnt)
        return fresh_step(self._job, start, ONE_RANK, self._servers.strategy, None, servers)

    def _save(self, log: PreparedLog, number: int) -> None:
        """Makes a checkpoint after a period; which one it was is on disk first."""
        latest = {"steps": self._state.steps, "log": log.fingerprint, "number": number}
        folder = self._directory / CHECKPOINTS
        folder.mkdir(exist_ok=True)
        write_atomically(folder / LATEST, json.dumps(latest))
        self._checkpoints.save(self._step, self._state, None)

    def _check_latest(self, log: PreparedLog, number: int) -> None:
        """Checks that a checkpoint that is ahead of the increments is ahead by this period."""
        latest = json.loads((self._directory / CHECKPOINTS / LATEST).read_text())
        if latest != {"steps": self._state.steps, "log": log.fingerprint, "number": number}:
            raise UserError(
                f"{self._directory} was trained on a period of another log when its process ended, and has no "
                "increment of it: give that --data again first, or another --out."
            )

    def _metrics(self, network: nn.Module, period: Period, log: PreparedLog) -> Metrics:
        with torch.no_grad():
            return logit_metrics(split_logits(network, period.rows), period.rows, log)

    def _train(self, period: Period) -> None:
        """Trains on a period's rows, once."""
        self._state.steps += train_once(self._step, period.rows, self._job, ONE_RANK)
        self._state.examples += period.rows.rows

    def _diverged(self, period: Period, number: int) -> UserError:
        begins = f"the period that begins at {time_of(period.first)}"
        return UserError(
            f"training diverged in {begins if period.first is not None else f'period {number}'}; "
            f"{self._directory} stays at version {self._version.number}. Give a lower training.learning_rate= and "
            "another --out."
        )

    def _serve(self, trained: TrainedPeriod) -> tuple[IncrementInfo, Weights, Tensor]:
        """Gives the served network what training has changed; returns what makes an increment of it."""
        served = self._served.state_dict()
        found = self._step.changed({name: tensor.cpu() for name, tensor in served.items()})
        before = served[KEYS].clone() if KEYS in served else None
        apply_changes(served, found)
        begun = gone = 0
        if before is not None:
            after = served[KEYS]
            begun, gone = (len(without_rows(*keys)) for keys in ((after, before), (before, after)))
        self._served.load_state_dict(served)  # also makes the index of growing tables
        info = IncrementInfo(
            number=self._version.number + 1,
            base=self._version.base,
            parent=self._version.identity,
            steps=self._state.steps - self._before,
            period=trained,
            begun=begun,
            gone=gone,
        )
        return info, found, self._bundle.scores(self._served)

    def _written(self, writing: Future[Increment]) -> Increment:
        increment = writing.result()
        self.increments.append(increment)
        self._version = increment.version
        return increment


def time_of(milliseconds: int | None) -> str:
    """Returns a time stamp as people read it, in UTC; words where there is none."""
    if milliseconds is None:
        return "no time stamp"
    return f"{datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC):%Y-%m-%d %H:%M}"
