"""Trains one model on one log: passes over the data, evaluations on validation, the best weights kept.

Cross-entropy on the log's labels and weights. Validation NE is taken at fixed numbers of examples, the
same for every model of a study; where it does not improve, learning rates drop (reduce on plateau), and
after `patience` such evaluations training ends. The test split is never touched here.
"""

from __future__ import annotations

import itertools
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dhen.model import build_model
from trials.checkpoint import Weights
from trials.compilation import CALIBRATION_STEPS, compile_if_it_pays
from trials.data.cache import PreparedLog
from trials.data.loader import Batch, train_batches
from trials.data.prefetch import on_device
from trials.evaluation import evaluate
from trials.events import Diverged, Evaluated, Event, Progress, Trained
from trials.hardware import device
from trials.job import Job, TrainingConfig
from trials.record import CurvePoint, Metrics
from trials.step import TrainStep

FINITE_CHECK_STEPS = 25
"""Losses are checked in groups, so that an accelerator is not made to wait at every step."""


class DivergenceError(ArithmeticError):
    """The loss of a step was NaN or infinite."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"loss {loss} at step {step}")
        self.step, self.loss = step, loss


@dataclass
class _State:
    """What training carries from step to step."""

    examples: int = 0
    steps: int = 0
    losses: list[Tensor] = field(default_factory=list)
    """Of the steps since the last check."""
    loss_sum: float = 0.0
    loss_steps: int = 0
    curve: list[CurvePoint] = field(default_factory=list)
    best: Metrics | None = None
    best_weights: Weights | None = None
    stale: int = 0
    """Evaluations in a row without a better NE."""
    evaluate_seconds: float = 0.0
    rate_factor: float = 1.0
    """What plateaus have left of the learning rates."""
    speeds: list[float] = field(default_factory=list)
    """Examples a second in each stretch between evaluations."""


def train(
    job: Job,
    log: PreparedLog,
    emit: Callable[[Event], None],
    *,
    keep: Callable[[Weights], None],
    start_from: Weights | None = None,
    progress_seconds: float,
) -> None:
    """Trains `job` on `log`; the best weights go to `keep` at the end, unless the loss diverged.

    Emits `Progress` every `progress_seconds`, one `Evaluated` for each evaluation, and `Trained` or
    `Diverged` at the end. `start_from` continues from other weights of the same model in place of fresh ones.
    """
    torch.manual_seed(job.seed)
    where = device()
    model = build_model(job.model, job.features)
    if start_from is not None:
        model.load_state_dict(start_from)
    step = TrainStep(model.to(where).train(), job.training)
    try:
        state = _run(step, job, log, emit, progress_seconds)
    except DivergenceError as error:
        emit(Diverged(step=error.step, loss=str(error.loss)))
        return
    assert state.best is not None
    assert state.best_weights is not None
    keep(state.best_weights)
    speed = statistics.median(state.speeds)
    emit(
        Trained(
            best=state.best,
            examples_per_second=speed,
            step_ms=1000.0 * (job.training.batch_size or 0) / speed,
            peak_memory_bytes=_peak_memory_bytes(where),
            train_seconds=state.curve[-1].seconds - state.evaluate_seconds,
            evaluate_seconds=state.evaluate_seconds,
        )
    )


def _run(
    step: TrainStep, job: Job, log: PreparedLog, emit: Callable[[Event], None], progress_seconds: float
) -> _State:
    """Steps and evaluations until the passes are over or validation no longer improves."""
    config, state = job.training, _State()
    assert config.epochs is not None
    where = device()
    total = config.epochs * log.split("train").rows
    assert config.evaluate_every is not None
    every = config.evaluate_every
    began = last_progress = stretch_began = time.perf_counter()
    stretch_examples, next_evaluation = 0, every
    batches = on_device(_epochs(log, config, job.seed), where)
    for batch, last in _mark_last(batches):
        rate = step.scale_learning_rates(_rate_factor(config, state, total))
        loss = step(batch)
        state.steps += 1
        state.examples += batch.features.size
        stretch_examples += batch.features.size
        _note_loss(state, loss)
        if state.steps == CALIBRATION_STEPS:
            _consider_compiling(step, config, total - state.examples, time.perf_counter() - began)
        now = time.perf_counter()
        if now - last_progress > progress_seconds:
            last_progress = now
            emit(Progress(examples=state.examples, total_examples=total, seconds=now - began))
        if state.examples < next_evaluation and not last:
            continue
        next_evaluation += every
        _check_losses(state)
        if not step.is_finite():
            raise DivergenceError(state.steps, math.nan)
        now = time.perf_counter()
        state.speeds.append(stretch_examples / (now - stretch_began))
        step.settle()
        validation = evaluate(step.model, log, "validation")
        stretch_began, stretch_examples = time.perf_counter(), 0
        state.evaluate_seconds += stretch_began - now
        point = CurvePoint(
            examples=state.examples,
            epoch=state.examples / log.split("train").rows,
            train_loss=state.loss_sum / state.loss_steps,
            learning_rate=rate,
            seconds=stretch_began - began,
            validation=validation,
        )
        emit(Evaluated(point=point))
        if _judge(state, point, step, config):
            break
    return state


def _consider_compiling(step: TrainStep, config: TrainingConfig, examples_left: int, seconds: float) -> None:
    """After the first steps; what was decided is in the rank's log."""
    assert config.batch_size is not None
    steps_left = examples_left // config.batch_size
    print(compile_if_it_pays(step.model, seconds / CALIBRATION_STEPS, steps_left), flush=True)


def _rate_factor(config: TrainingConfig, state: _State, total_examples: int) -> float:
    """What learning rates are multiplied by at the next step: by schedule, and by plateaus so far."""
    done = state.examples / total_examples if config.schedule == "linear" else 0.0
    return (1.0 - done) * state.rate_factor


def _judge(state: _State, point: CurvePoint, step: TrainStep, config: TrainingConfig) -> bool:
    """Keeps the best weights, lowers learning rates on a plateau; True where training should end."""
    state.curve.append(point)
    state.loss_sum, state.loss_steps = 0.0, 0
    if state.best is None or point.validation.ne < state.best.ne:
        state.best, state.stale = point.validation, 0
        state.best_weights = step.weights()
        return False
    state.stale += 1
    state.rate_factor *= config.plateau_factor
    return state.stale >= config.patience


def _note_loss(state: _State, loss: Tensor) -> None:
    state.losses.append(loss)
    if len(state.losses) >= FINITE_CHECK_STEPS:
        _check_losses(state)


def _check_losses(state: _State) -> None:
    """Adds up the losses since the last check; raises at the first that is not finite."""
    if not state.losses:
        return
    losses = torch.stack(state.losses).tolist()
    first = state.steps - len(losses) + 1
    state.losses.clear()
    for step, loss in enumerate(losses, start=first):
        if not abs(loss) < float("inf"):
            raise DivergenceError(step, loss)
    state.loss_sum += sum(losses)
    state.loss_steps += len(losses)


def _epochs(log: PreparedLog, config: TrainingConfig, seed: int) -> Iterator[Batch]:
    """The batches of all passes, one after another."""
    assert config.epochs is not None
    assert config.batch_size is not None
    for epoch in range(config.epochs):
        yield from train_batches(
            log.split("train"),
            batch_size=config.batch_size,
            seed=seed,
            epoch=epoch,
            shuffle=config.order == "shuffled",
        )


def _mark_last(batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Each batch, and whether it is the last."""
    ahead = itertools.chain(batches, (None,))
    current = next(ahead)
    for following in ahead:
        assert current is not None
        yield current, following is None
        current = following


def _peak_memory_bytes(where: torch.device) -> int:
    if where.type == "cuda":
        return torch.cuda.max_memory_allocated(where)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
