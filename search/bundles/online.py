"""Online training: each period of a log is scored before it is trained on, and leaves an increment.

The bundle in `out` holds three states of one network: as it was when online training began (frozen), its
newest version (served), and what trains. The served one predicts a period that nobody has trained on; then the
period's rows are trained on once, in the order of time; what has changed becomes an increment, which is
applied to the served one as any reader would. A checkpoint precedes the increment, so that whatever ends the
process, the same command goes on from the last period that was trained on. Increments are written while the
next period is scored.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from dhen.atomic_write import write_atomically
from dhen.errors import UserError, unknown_name
from dhen.values import Value, parse
from search.bundles.bundle import Bundle, is_bundle, read_bundle, weights_names
from search.bundles.export import copy_whole
from search.bundles.increments import Increment, IncrementInfo, TrainedPeriod, write_increment
from search.bundles.table_servers import TableServers
from search.log_config import set_override
from trials.cluster.machine import device
from trials.data.periods import Period, Periods
from trials.data.prepared_log import PreparedLog
from trials.data.read_options import DAY, parse_length
from trials.records.job import Job, TablesConfig, TrainingConfig
from trials.store.weights import KEYS, Weights, apply_changes, read_optimizer_state, without_rows
from trials.training.checkpointer import STEPS, Checkpoints, TrainingState, put_back
from trials.training.distributed_step import fresh_step
from trials.training.evaluation import logit_metrics, split_logits
from trials.training.progressive import FIXED, in_order_of_time, train_once
from trials.training.step import ONE_RANK, PLAIN_DP, DivergenceError, Step

LOG = logging.getLogger(__name__)
CHECKPOINTS = ".online"
"""Folder in the bundle of the checkpoint from which training goes on."""
LATEST = "latest-period.json"
"""File in it that says which period the checkpoint has been trained on last."""


def check_network(bundle: Bundle) -> None:
    """Checks that a bundle is of one network, which can be trained.

    Raises:
        UserError: if it is an average, saying how to take one of its networks, or has tables of 8 bits.
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
        UserError: if `out` is another bundle, or none.
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
            servers: starts servers that hold the tables; None if this process does.
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
        """Training steps before online training began, if the bundle has the optimizers' state after them."""
        self.optimizers_begin_anew = False
        """Says whether there is no optimizer state to go on with: neither the bundle's, if nothing was trained
        online so far, nor a checkpoint's."""
        # what trains is as it was after the newest increment, or after a period whose increment was not written
        # any more; optimizer state is the checkpoint's, else the bundle's, or fresh if there is none
        exported = self._exported()
        fresh = TrainingState(next_evaluation=0, steps=exported)
        learnt = {} if self.increments else learnt
        self._step = self._fresh(learnt)
        put_back(self._step, learnt, ONE_RANK)
        restored = self._checkpoints.restore(self._step)
        self._state, _ = restored or (fresh, None)
        self.optimizers_begin_anew = restored is None and (bool(self.increments) or not self._before)
        if self._state.steps < exported:
            LOG.warning("the checkpoint is older than the newest increment: optimizers begin anew")
            self._step, self._state = self._fresh({}), fresh
            self.optimizers_begin_anew = True
        if self._state.steps == exported:
            self._step.nothing_changed()

    def done(self, periods: Periods) -> int:
        """Returns how many periods of a log have been trained on already.

        Raises:
            UserError: if the log was cut otherwise before, or what is left of it begins before rows that were
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
            UserError: as `done`, and if the training diverges; increments before stay.
        """
        with ThreadPoolExecutor(1) as pool:
            writing: Future[Increment] | None = None
            exported = self._exported()
            for number in range(self.done(periods), len(periods)):
                period = periods[number]
                with torch.no_grad():
                    online, frozen = (
                        logit_metrics(split_logits(network, period.rows), period.rows, periods.log)
                        for network in (self._served, self._frozen)
                    )
                ahead = self._state.steps > exported  # it was trained on before a process ended
                latest = {"steps": self._state.steps, "log": periods.log.fingerprint, "number": number}
                if ahead:
                    # the checkpoint must be ahead of the increments by this very period
                    if json.loads((self._directory / CHECKPOINTS / LATEST).read_text()) != latest:
                        raise UserError(
                            f"{self._directory} was trained on a period of another log when its process ended, "
                            "and has no increment of it: give that --data again first, or another --out."
                        )
                else:
                    try:
                        self._train(period)
                    except DivergenceError:
                        if writing is not None:
                            yield self._written(writing)
                        begins = f"the period that begins at {time_of(period.first)}"
                        raise UserError(
                            f"training diverged in {begins if period.first is not None else f'period {number}'}; "
                            f"{self._directory} stays at version {self._version.number}. Give a lower "
                            "training.learning_rate= and another --out."
                        ) from None
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

    def _train(self, period: Period) -> None:
        """Trains on a period's rows, once."""
        self._state.steps += train_once(self._step, period.rows, self._job, ONE_RANK)
        self._state.examples += period.rows.rows

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
    """Returns a time stamp as people read it, in UTC; words if there is none."""
    if milliseconds is None:
        return "no time stamp"
    return f"{datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC):%Y-%m-%d %H:%M}"


# What can be set of online training: the length of periods, the training, and servers of its tables.

ONLINE_KEYS = ("period", "servers", "training")
"""Keys that a user may give; how tables on servers are trained is below `training.tables`."""


class OnlineSettings(Value):
    """The settings of online training."""

    period: str
    """Length of a period: `1d`, `6h`, or a number of rows."""
    servers: int | None = Field(default=None, gt=0)
    """Number of servers that hold the embedding tables, in processes of their own; None: the trainer does."""
    tables: TablesConfig = TablesConfig()
    """How tables on servers are trained."""
    training: TrainingConfig
    """The training, apart from its tables."""

    @model_validator(mode="after")
    def _servers_are_wanted(self) -> OnlineSettings:
        synchrony = self.tables.synchrony
        if synchrony == "async":
            raise ValueError(
                "training.tables.synchrony=async is for ranks that do not wait for each other, and online "
                "training has one: give training.tables.synchrony=semi or sync"
            )
        if self.servers is not None and synchrony == "local":
            raise ValueError(
                f"servers={self.servers} would hold tables, and training.tables.synchrony=local has them in the "
                "trainer: give training.tables.synchrony=semi or sync too, or leave servers out"
            )
        if self.servers is None and synchrony != "local":
            raise ValueError(
                f"training.tables.synchrony={synchrony} has the tables on servers, and none are given: give "
                "servers=1 or more too, or leave it out"
            )
        return self

    def job(self, bundle: Bundle) -> Job:
        """Returns the job of training a bundle's network online: with what the order of time leaves open."""
        training = in_order_of_time(self.training)
        return bundle.job().replace(training=training.replace(tables=self.tables))


def online_settings(bundle: Bundle, overrides: Sequence[str]) -> OnlineSettings:
    """Returns a bundle's settings with `key=value` words applied. If servers are asked for, and not how tables
    on them are trained, it is as the bundle's were.

    Raises:
        UserError: for unknown keys and wrong values.
    """
    job = bundle.job()
    training = job.training.to_dict()
    of_bundle = training.pop("tables", {})
    data: dict[str, Any] = {"period": job.period or DAY, "training": training}
    for word in overrides:
        set_override(data, word)
    for unknown in sorted(set(data) - set(ONLINE_KEYS)):
        raise unknown_name("key", unknown, ONLINE_KEYS)
    tables = training.pop("tables", of_bundle if "servers" in data else {})
    data["period"] = str(data["period"])
    parse_length(data["period"])
    data["tables"] = parse(TablesConfig, tables, "training.tables")
    data["training"] = parse(TrainingConfig, training, "training")
    # none of the keys given may be settled by the order of time
    settled = in_order_of_time(data["training"])
    for key in sorted({word.partition("=")[0] for word in overrides}):
        name = key.removeprefix("training.")
        if name in FIXED and getattr(data["training"], name) != getattr(settled, name):
            raise UserError(
                f"{key}: rows come once, in the order of time, so that online training has {name}="
                f"{getattr(settled, name)}; leave this key out."
            )
    return parse(OnlineSettings, data, "online")


def check_servers(job: Job, servers: int) -> None:
    """Checks that each of so many servers has rows of a job's tables.

    Raises:
        UserError: if there are no tables, or fewer rows than servers.
    """
    if not job.features.tables:
        raise UserError(
            f"servers={servers} would hold embedding tables, and the bundle's network has none: leave servers out."
        )
    tables = job.features.tables
    most, what = sum(table.rows for table in tables), "the tables have"
    for table in tables:
        if table.growing is not None and table.rows - 1 < most:
            most, what = table.rows - 1, f"table {table.name!r} has"
    if servers > most:
        raise UserError(f"servers={servers}: {what} {most:,} row(s) to share; give servers={most} at most.")
