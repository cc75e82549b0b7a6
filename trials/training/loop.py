"""Trains one model on one log: passes over the data, evaluations on validation, the best weights kept.

Cross-entropy on the log's labels and weights. Validation NE is taken at fixed numbers of examples, the
same for every model of a study; if it does not improve, learning rates drop (reduce on plateau), and
after `patience` such evaluations training ends, or as soon as NE is far above its lowest. The test split
is never touched here. Several ranks run the same loop on slices of each batch, and decide alike because
they go by the same numbers.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from trials.cluster.cluster import Cluster
from trials.cluster.machine import device
from trials.data.loader import on_device
from trials.data.prepared_log import PreparedLog
from trials.records.events import DivergenceEvent, EvaluationEvent, Event, Progress, TrainingEvent, WrapEvent
from trials.records.job import Job
from trials.records.strategy import DataPart, Ranks, Strategy, rank_slice
from trials.records.trial_record import CurvePoint, Measurements, Metrics
from trials.store.weights import Weights
from trials.training.checkpointer import CHECKPOINT_SECONDS, Checkpoints, TrainingState, optimizer_state
from trials.training.compile_layers import CALIBRATION_STEPS, compile_if_it_pays
from trials.training.distributed_step import fresh_step
from trials.training.memory_limit import on_host, process_peak_bytes
from trials.training.process_group import as_first, mean_over
from trials.training.progressive import Pulse, score_ahead
from trials.training.schedule import PassBatches, Turn, handed_out, in_order, rate_factors
from trials.training.servers.client import Servers
from trials.training.servers.messages import LinkBrokenError
from trials.training.servers.server import Losses
from trials.training.step import ONE_RANK, PLAIN_DP, DivergenceError, Step, TrainStep, WeightAverage
from trials.training.stragglers import Stragglers, ThreadTime, like_ranks

# Stops a training when its time is over: after the same step on all ranks, and early enough to evaluate and keep
# what was learnt.

FORWARD_SHARE = 1 / 3
"""Share of a step's seconds that its forward pass takes, by which the first evaluation is expected."""
LOOK_SECONDS, MOST_STEPS = 1.0, 25
"""Seconds, and the largest number of steps, between two looks of several ranks, which agree at each."""


class TimeLimit:
    """When a training has to have ended."""

    def __init__(self, ends_at: float | None, ranks: Ranks, validation_rows: int) -> None:
        """Takes the Unix time of the end, by the first rank's clock; None for no limit. Alike on all ranks."""
        self._ends_at, self._ranks, self._validation_rows = ends_at, ranks, validation_rows
        self._next_look = 0

    def is_over(self, state: TrainingState, seconds: float) -> bool:
        """Tells, after a step, whether there is time for no more than an evaluation; the same on all ranks, a
        collective now and then. The training has taken so many `seconds`."""
        if self._ends_at is None or state.steps < self._next_look:
            return False
        step_seconds = (seconds - state.evaluate_seconds) / max(1, state.steps)
        if state.curve:
            evaluation = state.evaluate_seconds / len(state.curve)
        else:
            evaluation = (
                FORWARD_SHARE * step_seconds * self._validation_rows * state.steps / max(1, state.examples)
            )
        over = time.time() + step_seconds + evaluation > self._ends_at
        steps = 1.0 if self._ranks.world == 1 else min(MOST_STEPS, LOOK_SECONDS // max(step_seconds, 1e-9))
        over_first, steps = as_first(self._ranks, [float(over), max(1.0, steps)])
        self._next_look = state.steps + int(steps)
        return bool(over_first)


LOG = logging.getLogger(__name__)
FINITE_CHECK_STEPS = 25
"""Steps whose losses are checked together, so that an accelerator is not made to wait at every step."""
SETTLED_EVERY = 4
"""Checks of losses between two moments at which all rows decay by what is due, and a checkpoint may be made."""
BY_HEART = 1.2
"""NE on validation, as a multiple of the lowest so far, from which on a training learns its rows by heart and
ends; before products of ids are learnt late, NE was seen to rise to 1.07 times (docs/log.md)."""


@dataclass
class _Run:
    """The parts and the state of one training."""

    job: Job
    log: PreparedLog
    step: Step
    ranks: Ranks
    checkpoints: Checkpoints
    emit: Callable[[Event], None]
    progress_seconds: float
    limit: TimeLimit
    """When the training has to have ended."""
    state: TrainingState
    losses: list[Tensor] = field(default_factory=list)
    """Losses of the steps since the last check."""
    best_weights: Weights | None = None
    average: WeightAverage | None = None
    servers: Servers | None = None
    """Those that hold the tables; None if ranks do."""
    done: Losses = Losses(0.0, 0, 0)  # noqa: RUF009
    """What the last batch came to, of a rank that trains on its own."""
    own: ThreadTime | None = None
    """Measures what this rank takes itself; None if no others wait for it, or a device does the work."""
    stragglers: Stragglers | None = None
    """Judges what all ranks take; None if nothing is measured."""
    own_since: int = 0
    """Examples that were done when the stretch began that is measured now."""
    cut_after: int | None = None
    """Examples after which it was stopped; None if it came to its own end."""
    checks: int = 0
    """Number of checks of losses since the last evaluation, or the checkpoint from which the training went on."""

    @property
    def data(self) -> DataPart:
        """Which part of every batch this rank reads."""
        return self.ranks.data_part(self.step.strategy.pipeline)

    @cached_property
    def batches(self) -> PassBatches:
        """The batches of all passes."""
        return PassBatches(self.job, self.log)

    @property
    def alone(self) -> bool:
        """Whether ranks train on their own, against servers."""
        return self.servers is not None and self.job.training.tables.synchrony == "async"

    @property
    def decays_late(self) -> bool:
        """Says whether this process has tables whose rows decay when they are read, or are saved."""
        return self.job.training.table_decay > 0.0 and self.servers is None

    @property
    def total_examples(self) -> int:
        """Number of examples of all passes."""
        return self.job.training.examples(self.log.manifest.rows["train"])

    def progress(self, seconds: float) -> Progress:
        """Returns how far the training is after so many seconds."""
        unsaved = lost = None
        if self.servers is not None:
            unsaved = self.state.steps - self.checkpoints.newest_steps
            lost = self.servers.lost_steps or None
        return Progress(
            examples=self.state.examples,
            total_examples=self.total_examples,
            seconds=seconds,
            unsaved_steps=unsaved,
            lost_steps=lost,
        )


def train(
    job: Job,
    log: PreparedLog,
    emit: Callable[[Event], None],
    *,
    keep: Callable[[Weights], None],
    start_from: Weights | None = None,
    progress_seconds: float,
    ranks: Ranks = ONE_RANK,
    strategy: Strategy = PLAIN_DP,
    cluster: Cluster | None = None,
    evaluation_rows: int | None = None,
    ends_at: float | None = None,
    servers: Servers | None = None,
    resume_from: Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> None:
    """Trains `job` on `log`; rank 0's best weights go to `keep` at the end, unless the loss diverged.

    Emits `WrapEvent`, `Progress` every `progress_seconds`, one `EvaluationEvent` for each evaluation, and
    `TrainingEvent` or `DivergenceEvent` at the end. Of a job with a `period`, the metrics in `TrainingEvent` are
    those of validation's periods, each scored by the best weights after they have been trained on the ones before.

    Args:
        job: the job, resolved.
        log: the job's log.
        emit: takes events; of several ranks, the first rank's count.
        keep: takes the best weights.
        start_from: other weights of the same model to begin with in place of fresh ones.
        progress_seconds: seconds between two `Progress`.
        ranks: the ranks; several need a default process group that all have joined, and call this alike.
        strategy: how the model is held.
        cluster: the cluster for which the job was planned.
        evaluation_rows: rows of a rank that go forward at once in an evaluation, by the plan.
        ends_at: Unix time at which training is stopped, with an evaluation; None for no limit.
        servers: those that hold the tables; None if ranks do. Of ranks that train on their own
            (`training.tables.synchrony=async`) the first calls this, as if it were alone, and the others `assist`.
        resume_from: a folder for checkpoints. If there is one, training goes on from it, and tells the
            evaluations it had once more; new ones are made in it, and removed when the training has ended.
        checkpoint_seconds: seconds of training that may be lost.

    Raises:
        UserError: for a checkpoint of another job, a split with fewer rows than there are ranks, or delayed
            updates under a strategy that has none.
    """
    total = job.training.examples(log.manifest.rows["train"])
    step = fresh_step(job, start_from, ranks, strategy, cluster, servers, evaluation_rows, total)
    checkpoints = Checkpoints(resume_from, job, ranks, checkpoint_seconds)
    fresh = TrainingState(next_evaluation=job.evaluate_every), None
    average = WeightAverage(step, job.weight_average) if job.weight_average else None
    state, best_weights = checkpoints.restore(step, average) or fresh
    emit(WrapEvent(strategy=step.strategy.name))
    for point in state.curve:
        emit(EvaluationEvent(point=point))
    limit = TimeLimit(ends_at, ranks, log.manifest.rows["validation"])
    run = _Run(job, log, step, ranks, checkpoints, emit, progress_seconds, limit, state)
    run.best_weights, run.average, run.servers = best_weights, average, servers
    if ranks.world > 1 and device().type == "cpu":
        run.own, run.stragglers = ThreadTime(), Stragglers(like_ranks(ranks, step.strategy))
    try:
        try:
            _train(run)
        except LinkBrokenError:  # how much goes with the server
            emit(run.progress(state.seconds))
            raise
        finally:
            if run.own is not None:
                run.own.close()
        assert run.best_weights is not None
        best, best_weights, cache_use, staleness = (
            state.best,
            run.best_weights,
            step.cache_use,
            step.staleness,
        )
        lost_steps, cut_after = servers.lost_steps if servers is not None else 0, run.cut_after
        if job.period is not None:
            del run, step, average  # a second network needs their room
            goes_on = Pulse(emit, progress_seconds, examples=state.examples)
            best = score_ahead(
                job,
                best_weights,
                log,
                "validation",
                ranks=ranks,
                strategy=strategy,
                cluster=cluster,
                evaluation_rows=evaluation_rows,
                goes_on=goes_on,
            )
    except DivergenceError as error:
        LOG.warning("diverged: %s", error)
        emit(DivergenceEvent(step=error.step, loss=str(error.loss)))
    else:
        assert best is not None
        if ranks.first:
            keep(best_weights)
        speed = statistics.median(state.speeds)
        measured = Measurements(
            examples_per_second=speed,
            step_ms=1000.0 * (job.training.batch_size or 0) / speed,
            peak_memory_bytes=process_peak_bytes(device()),
            train_seconds=state.curve[-1].seconds - state.evaluate_seconds,
            evaluate_seconds=state.evaluate_seconds,
            table_hit_rate=cache_use.hit_rate if cache_use else None,
            table_rows_copied=cache_use.rows_a_step if cache_use else None,
            staleness=staleness,
            lost_steps=lost_steps or None,
            cut_after=cut_after,
        )
        emit(TrainingEvent(best=best, measured=measured))
        LOG.info(
            "training ended: best NE %.6f after %s examples; %s examples/s",
            best.ne,
            f"{state.best_examples:,}",
            f"{speed:,.0f}",
        )
    if checkpoints.count:
        LOG.info("checkpoints: %d, %.2f s in all", checkpoints.count, checkpoints.seconds)
    checkpoints.drop()


def _train(run: _Run) -> None:
    """Runs steps and evaluations until the passes are over or validation no longer improves."""
    config, state, step = run.job.training, run.state, run.step
    assert config.batch_size is not None
    began = last_progress = stretch_began = time.perf_counter()
    began -= state.seconds
    mine = rank_slice(config.batch_size, *run.data)
    LOG.info(
        "training begins: %s of %s examples are done; steps of %d, of which this rank has %d",
        f"{state.examples:,}",
        f"{run.total_examples:,}",
        config.batch_size,
        mine.stop - mine.start,
    )
    first_steps, stretch_first, rate = state.steps, state.examples, 0.0
    _measure_anew(run)
    if run.alone:
        assert run.servers is not None
        turns = handed_out(run.batches, run.servers, state, config, lambda: run.done)
    else:
        turns = in_order(
            on_device(run.batches.from_step(state.steps, *run.data), device()), config.batch_size, state
        )
    for turn in turns:
        rate, checked = _step(run, turn)
        # what a checkpoint brings about is done also if none follows: one must change nothing
        if checked:
            step.finish_update()
        run.checks += checked
        may_save = checked and (not run.decays_late or run.checks % SETTLED_EVERY == 0)
        if may_save and run.decays_late:
            step.settle()
        now = time.perf_counter()
        if state.steps - first_steps == CALIBRATION_STEPS and isinstance(step, TrainStep):
            if device().type == "cuda":
                torch.cuda.synchronize()  # what was only started is part of the time
            steps = (state.examples - stretch_first) // config.batch_size
            seconds = (time.perf_counter() - stretch_began) / steps
            steps_left = (run.total_examples - state.examples) // config.batch_size
            LOG.info(compile_if_it_pays(step.model, seconds, steps_left))
        if now - last_progress > run.progress_seconds:
            last_progress = now
            run.emit(run.progress(now - began))
        # ranks on their own stop together only when one of them evaluates
        over = (turn.evaluates or not run.alone) and run.limit.is_over(state, now - began)
        if not (turn.evaluates or over):
            if may_save and run.checkpoints.due(evaluated=False):
                stretch_began += _save(run, began)
                _measure_anew(run)
            continue
        state.next_evaluation += run.job.evaluate_every
        run.checks = 0
        _check_losses(run)
        if not step.is_finite():
            raise DivergenceError(state.steps, math.nan)
        now = time.perf_counter()
        state.speeds.append((state.examples - stretch_first) / (now - stretch_began))
        step.settle()
        if _goes_on_unseen(run, turn):
            if run.checkpoints.due(evaluated=True):
                _save(run, began)
            stretch_began, stretch_first = time.perf_counter(), state.examples
            _measure_anew(run)
            continue
        validation, averaged = _evaluate(run)
        stretch_began, stretch_first = time.perf_counter(), state.examples
        state.evaluate_seconds += stretch_began - now
        if state.loss_steps or not state.curve:
            train_loss = state.loss_sum / max(1, state.loss_steps)
        else:  # the batches since the last evaluation were lost with the ranks that had them
            train_loss = state.curve[-1].train_loss
        point = CurvePoint(
            examples=state.examples,
            epoch=state.examples / config.rows_used(run.log.manifest.rows["train"]),
            train_loss=train_loss,
            learning_rate=rate,
            seconds=stretch_began - began,
            validation=validation,
            averaged=averaged,
            clipped=None if config.clip_norm is None else state.clipped_steps / max(1, state.loss_steps),
        )
        LOG.info(
            "evaluated after %s examples: NE %.6f on validation, loss %.6f in training",
            f"{point.examples:,}",
            validation.ne,
            point.train_loss,
        )
        if point.clipped is not None:
            LOG.info("gradients of %.0f %% of the steps were clipped", 100.0 * point.clipped)
        ends = _judge(run, point)
        if over and not (ends or turn.last):
            ends, run.cut_after = True, state.examples
            LOG.info("stopped: its time is over")
        # before anybody hears of it: who is killed for this evaluation goes on from here
        if not (ends or turn.last) and run.checkpoints.due(evaluated=True):
            stretch_began += _save(run, began)
        run.emit(EvaluationEvent(point=point))
        if ends:
            break
        _measure_anew(run)


def _step(run: _Run, turn: Turn) -> tuple[float, bool]:
    """Runs the step of a turn, if it has one; returns the dense learning rate, and whether losses were
    checked."""
    config, state, step = run.job.training, run.state, run.step
    assert config.batch_size is not None
    trained = turn.batch is not None
    state.steps = turn.steps - trained
    state.examples = state.steps * config.batch_size
    factors = rate_factors(config, state.examples, state.rate_factor, run.total_examples)
    rate = step.scale_learning_rates(*factors)
    if turn.batch is None:
        return rate, False
    if state.steps % run.batches.per_pass == 0:
        step.begin_pass()
    if turn.following is not None:
        step.ahead(turn.following)
    loss = step(turn.batch)
    state.steps += 1
    state.examples += config.batch_size
    if run.alone:
        run.done = Losses(float(loss), 1, step.clipped_steps())
        return rate, False
    run.losses.append(loss)
    if len(run.losses) < FINITE_CHECK_STEPS:
        return rate, False
    _check_losses(run)
    return rate, True


def _save(run: _Run, began: float) -> float:
    """Saves a checkpoint; returns the seconds it took."""
    run.state.seconds = time.perf_counter() - began
    return run.checkpoints.save(run.step, run.state, run.best_weights, run.average)


def _goes_on_unseen(run: _Run, turn: Turn) -> bool:
    """Tells whether a refit, which has nothing to be evaluated on, goes on after the place of an evaluation.

    Weights are noted there for their mean, and rates are lowered where those of the earlier training were.
    """
    refit, config, state = run.job.refit, run.job.training, run.state
    number = state.evaluations(run.job.evaluate_every)
    if refit is None or turn.last or number >= refit.evaluations:
        return False
    if run.average is not None:
        run.average.note()
    if number in refit.lowered_after:
        assert config.plateau_factor is not None
        state.rate_factor *= config.plateau_factor
    return True


def _evaluate(run: _Run) -> tuple[Metrics, bool]:
    """Evaluates on validation: the weights as they are, or, with True, their mean over the last evaluations if it
    is better. A refit was trained on these rows, so that nothing is better for sure: it takes the mean if there is
    one."""
    validation, average = None, run.average
    if run.job.refit is None or average is None:
        validation = run.step.evaluate(run.log, "validation")
    if average is not None:
        average.note()
        if average.is_mean:
            with average.in_place(run.state.steps):
                of_mean = run.step.evaluate(run.log, "validation")
            if validation is None or of_mean.ne < validation.ne:
                return of_mean, True
    return validation or run.step.evaluate(run.log, "validation"), False


def _judge(run: _Run, point: CurvePoint) -> bool:
    """Keeps the best weights, lowers learning rates on a plateau; returns True if training should end, as a
    refit does at its only evaluation."""
    state, config = run.state, run.job.training
    state.curve.append(point)
    state.loss_sum, state.loss_steps, state.clipped_steps = 0.0, 0, 0
    if state.best is None or point.validation.ne < state.best.ne:
        state.best, state.best_examples, state.stale = point.validation, point.examples, 0
        better = run.average.in_place(state.steps) if run.average and point.averaged else nullcontext()
        with better, on_host():
            run.best_weights = run.step.weights()
            if run.job.period is not None:  # it is judged as it goes on learning
                run.best_weights |= optimizer_state(run.step, state.steps, run.ranks)
        return run.job.refit is not None
    assert config.patience is not None
    assert config.plateau_factor is not None
    state.stale += 1
    state.rate_factor *= config.plateau_factor
    return state.stale >= config.patience or point.validation.ne >= BY_HEART * state.best.ne


def _check_losses(run: _Run) -> None:
    """Adds up the losses since the last check, their means over ranks; raises at the first that is not finite. Has
    judged what each rank took itself. A collective."""
    if not run.losses:
        return
    mine = torch.stack(run.losses)
    if run.own is None or run.stragglers is None:
        losses = mean_over(run.ranks, mine).tolist()
    else:  # what each rank took itself travels with them
        (taken, wall), world = run.own.taken(), run.ranks.world
        own = torch.zeros(world, dtype=mine.dtype, device=mine.device)
        own[run.ranks.rank] = taken
        means = mean_over(run.ranks, torch.cat((mine, own))).tolist()
        losses, seconds = means[: len(mine)], [world * mean for mean in means[len(mine) :]]
        for slow in run.stragglers.note(seconds, wall, run.own_since):
            LOG.warning("%s", slow.words)
            run.emit(slow)
        _measure_anew(run)
    first_step = run.state.steps - len(losses) + 1
    run.losses.clear()
    for step, loss in enumerate(losses, start=first_step):
        if not abs(loss) < float("inf"):
            raise DivergenceError(step, loss)
    run.state.loss_sum += sum(losses)
    run.state.loss_steps += len(losses)
    run.state.clipped_steps += run.step.clipped_steps()


def _measure_anew(run: _Run) -> None:
    """Begins a stretch in which is measured what this rank takes itself; what was since the last one is left
    out."""
    if run.own is not None:
        run.own_since = run.state.examples
        run.own.begin()
