"""PowerSGD on ranks: it follows its paper's algorithm, sends and holds what is planned, and goes on to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from command_line import write_log

# the same network, batches and counters as one-bit Adam's
from distributed.test_one_bit import (
    EXAMPLES,
    RANKS,
    SCHEMA,
    STEPS,
    TOTAL,
    WIDE,
    assert_alike,
    batch,
    config,
    fresh,
    gap,
    interrupted,
    job_of,
    trained,
    wrapped,
)
from gloo_ranks import on_ranks
from interrupted import Told, run
from torch import Tensor
from torch.optim import AdamW

from dhen.members import cross_entropy
from trials.cluster.this_machine import load_cluster
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.optim.one_bit_adam import LowRank, low_rank_of
from trials.planner.memory_counter import MemoryCounter
from trials.planner.pricing import CostModel
from trials.planner.segments import shapes_of
from trials.records.job import TrainingConfig
from trials.records.strategy import Ranks, named
from trials.training.distributed.parallelize import device_mesh, parallelize
from trials.training.distributed.power_sgd import EPSILON, WHOLE_GRADIENTS

FEWER, RANK, START = 2, 2, TOTAL // EXAMPLES // WHOLE_GRADIENTS
ADAMW = {"optimizer": "adamw"}
POWER = ADAMW | {"power_sgd_rank": RANK}


def low_rank(**more: object) -> TrainingConfig:
    return config(**POWER, **more)


def orthogonal(p_NR: Tensor) -> Tensor:
    """Gram-Schmidt, column by column."""
    columns: list[Tensor] = []
    for column in p_NR.unbind(1):
        for earlier in columns:
            column = column - (earlier @ column) * earlier
        columns.append(column / (column.norm() + EPSILON))
    return torch.stack(columns, dim=1)


def algorithm(first_q: dict[int, Tensor]) -> list[float]:
    """Losses of all workers by algorithms 1 and 2 of the paper, with AdamW in place of momentum; `first_q` by the
    place of a matrix, since torch draws it."""
    model, settings = fresh(), low_rank()
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    residues = [[torch.zeros_like(p) for p in parameters] for _ in range(RANKS)]
    every_q, losses = dict(first_q), []
    for number in range(STEPS):
        gradients, loss = [], 0.0
        for rank in range(RANKS):
            inputs, label, _ = batch(number, rank)
            of_rank = cross_entropy(model(inputs), label, None)
            gradients.append(torch.autograd.grad(of_rank, parameters))
            loss += of_rank.item() / RANKS
        losses.append(loss)
        for place, p in enumerate(parameters):
            p.grad = torch.stack([of_rank[place] for of_rank in gradients]).mean(dim=0)
            if number < START or place not in every_q:
                continue
            sent = [
                (gradients[rank][place] + residues[rank][place]).flatten(start_dim=1) for rank in range(RANKS)
            ]
            q = orthogonal(every_q[place])
            left = orthogonal(torch.stack([m @ q for m in sent]).sum(dim=0))
            every_q[place] = torch.stack([m.T @ left for m in sent]).mean(dim=0)
            product = left @ every_q[place].T
            p.grad = product.view_as(p)
            for rank, m in enumerate(sent):
                residues[rank][place] = (m - product).view_as(p)
        optimizer.step()
    return losses


def follows() -> dict[str, Any]:
    """Losses of ranks, and of the algorithm from the Q that they begin with."""
    step = wrapped("dp", low_rank())
    power = step.engine._power_sgd  # type: ignore[attr-defined]
    losses = trained(step, START)
    drawn: dict[int, Tensor] = {}
    # torch draws Q by bucket from this seed, in the order in which it has the bucket's matrices
    buckets, rng = power._buckets, __import__("numpy").random.RandomState(0)
    for index in sorted(buckets):
        generator = torch.Generator().manual_seed(int(rng.randint(1_000_000_000)))
        for place in power._in_order_of_q(buckets[index]):
            p = power._parameters[place]
            drawn[place] = torch.randn(1, p.numel() // len(p), RANK, generator=generator)[0]
    losses += trained(step, STEPS, START)
    assert_alike(step)
    halves = trained(wrapped("dp+full_checkpointing+micro_batches=2", low_rank()))
    plain = trained(wrapped("dp", config(**ADAMW)))
    bf16 = trained(wrapped("dp", low_rank(precision="bf16")))
    return {"ranks": losses, "halves": halves, "algorithm": algorithm(drawn), "plain": plain, "bf16": bf16}


def waited_for(all_reduce: Callable[..., dist.Work | None]) -> Callable[..., dist.Work | None]:
    """What follows a collective that is done runs in this thread, and not in gloo's, which no counter sees."""

    def reduced(*args: Any, **options: Any) -> dist.Work | None:
        work = all_reduce(*args, **options)
        if work is not None:
            work.get_future().wait()
        return work

    return reduced


def sent_and_held() -> dict[str, Any]:
    """Bytes of all-reduces in a step, planned and seen; the most that is held over all steps, and planned."""
    settings, strategy = low_rank(), named("dp")
    cluster = load_cluster("a100-80gb").with_ranks(f"1x{RANKS}").replace(device="cpu")
    pricing = CostModel(WIDE, SCHEMA, settings.replace(batch_size=10 * RANKS), cluster)
    sizes = low_rank_of(shapes_of(pricing.segments(1)), RANK)
    assert sizes is not None
    with MemoryCounter() as counter:
        mesh = device_mesh("dp", 1, RANKS, "cpu")
        step = parallelize(fresh(WIDE), strategy, settings, mesh, total_examples=TOTAL)
        for number in range(START + 3):
            with patch("torch.distributed.all_reduce", side_effect=waited_for(dist.all_reduce)) as reduced:
                step.forward_backward(batch(number, 0))
            step.update()
    seen = sum(2 * call.args[0].nbytes for call in reduced.call_args_list)
    return {
        "seen": seen,
        "sent": 2 * 4 * sizes.sent,
        "whole": 2 * 4 * sum(segment.parameters for segment in pricing.segments(1)),
        "held": counter.peak,
        "planned": pricing.memory(strategy).total,
    }


def resumed(folder: Path) -> dict[str, Any]:
    """Broken off once it compresses; then to the end, by as many ranks or fewer."""
    world = dist.get_world_size()
    ranks, log = Ranks(dist.get_rank(), 1, world), PreparedLog.open(folder / "log")
    job, place = job_of(log, **POWER), folder / ("some" if world == RANKS else "fewer")
    job = job.replace(training=job.training.replace(power_sgd_rank=1))  # matrices are small here
    plain, strategy = (
        job.replace(training=job.training.replace(power_sgd_rank=0)),
        named("dp+micro_batches=2"),
    )
    found = {}
    if world == RANKS:
        for name, undisturbed in (("whole", job), ("exact", plain)):
            found[name] = run(undisturbed, log, Told(), None, ranks=ranks, strategy=strategy).answer
        interrupted(job, log, place, folder / "fewer", ranks, strategy)
    return found | {"again": run(job, log, Told(), place, ranks=ranks, strategy=strategy).answer}


def on_a_rank(folder: Path) -> dict[str, Any]:
    return {"losses": follows(), "sizes": sent_and_held(), "resumed": resumed(folder)}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("power_sgd")
    prepare([write_log(folder / "log.csv", 1500)], out=folder / "log")
    return folder


@pytest.fixture(scope="module")
def answers(shared: Path) -> dict[str, Any]:
    found: dict[str, Any] = on_ranks(on_a_rank, RANKS, shared)
    return found


def test_ranks_follow_the_papers_algorithm(answers: dict[str, Any]) -> None:
    losses = answers["losses"]
    assert losses["ranks"] == pytest.approx(losses["algorithm"], abs=2e-4)
    assert losses["halves"] == pytest.approx(losses["ranks"], abs=2e-4)
    assert losses["bf16"] == pytest.approx(losses["ranks"], abs=5e-2)
    assert losses["plain"][: START + 1] == pytest.approx(losses["ranks"][: START + 1], abs=1e-5)
    assert losses["plain"] != pytest.approx(losses["ranks"], abs=1e-3)
    assert losses["ranks"][-1] < losses["ranks"][0] - 0.05


def test_ranks_send_and_hold_what_was_planned(answers: dict[str, Any]) -> None:
    sizes = answers["sizes"]
    assert sizes["seen"] == sizes["sent"] < sizes["whole"] / 10
    assert sizes["held"] == pytest.approx(sizes["planned"], rel=0.03)


def test_it_goes_on_to_the_bit_on_as_many_ranks(answers: dict[str, Any]) -> None:
    found = answers["resumed"]
    assert found["again"] == found["whole"] != found["exact"]


def test_it_goes_on_on_fewer(shared: Path, answers: dict[str, Any]) -> None:
    found = on_ranks(resumed, FEWER, shared)
    assert gap(found["again"], answers["resumed"]["whole"]) < 0.03


@pytest.mark.parametrize(
    ("numbers", "sizes"), [((100, 50, 2), (True, 200, 100, 300)), ((6, 1, 2), (False, 0, 0, 6))]
)
def test_small_gradients_are_sent_as_they_are(
    numbers: tuple[int, int, int], sizes: tuple[bool, int, int, int]
) -> None:
    assert LowRank.of(*numbers) == LowRank(*sizes)
