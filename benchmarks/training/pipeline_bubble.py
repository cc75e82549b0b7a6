"""How long do the ranks of a pipeline wait, beside what the planner says?

Each rank has a stage of a DHEN (two with `interleaved`) and trains by torch's schedule over gloo. How long each
pass lasts is noted; planned is the planner's clock (`trials.planner.pipeline`), given what passes took.
With `--pass-ms` they last so long at least and leave the cores to others, as those of an accelerator do, so that
four ranks on two cores have a bubble too; with 0 they last as long as this CPU takes, for which each rank needs a
core.

    OMP_NUM_THREADS=1 python -m benchmarks.training.pipeline_bubble
    OMP_NUM_THREADS=1 python -m benchmarks.training.pipeline_bubble --stages 2 --pass-ms 0 --width 1024
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.model import build_model, parse_model
from search.config import StudyConfig
from search.dataset import open_log
from search.log_config import DemoConfig
from trials.cluster.this_machine import load_cluster
from trials.data.loader import train_batches
from trials.data.prepared_log import PreparedLog
from trials.planner.pipeline import Kind, StageSeconds, played, wrong_micro_batches
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import CHUNKS_PER_RANK, Ranks, Schedule, Strategy
from trials.training.distributed_step import DistributedStep
from trials.training.memory_limit import keep_freed_memory
from trials.training.process_group import join

WARM_UP, DIFFERENT_BATCHES, LAYERS = 2, 3, 8
FORWARD, BACKWARD, WEIGHTS = "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"
"""Methods of torch's stages that are its passes."""
CPU = torch.device("cpu")


class Case(NamedTuple):
    """A pipeline."""

    stages: int
    schedule: Schedule
    micro_batches: int


class Timed(NamedTuple):
    """A pass as it was."""

    kind: Kind
    stage: int
    began: float
    """On a clock that processes of this machine share."""
    ended: float


@dataclass
class Passes:
    """The passes of this process so far."""

    timed: list[Timed]
    seconds: float = 0.0
    """Seconds that a forward pass lasts at least; backward lasts twice as long, each of its parts as long."""


Steps = list[list[Timed]]
"""The passes of each timed step."""


def main() -> None:
    """Prints a row for each pipeline."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="ranks of a pipeline (2 4)")
    parser.add_argument(
        "--per-stage", type=int, nargs="+", default=[1, 2, 4], help="micro-batches per rank (1 2 4)"
    )
    parser.add_argument(
        "--schedules", nargs="+", default=list(get_args(Schedule)), choices=get_args(Schedule)
    )
    parser.add_argument("--pass-ms", type=float, default=10.0, help="milliseconds of a forward pass (10)")
    parser.add_argument("--width", type=int, default=32, help="width of each layer's MLP (32)")
    parser.add_argument("--examples", type=int, default=64, help="examples of a micro-batch (64)")
    parser.add_argument("--steps", type=int, default=7, help="steps that are timed (7)")
    options = parser.parse_args()
    print(machine(), flush=True)
    rows = []
    for stages in options.stages:
        every = product(options.schedules, options.per_stage)
        cases = [Case(stages, schedule, per_stage * stages) for schedule, per_stage in every]
        cases = [case for case in cases if wrong_micro_batches(*_as_asked(case)) is None]
        rows += [_row(*each) for each in zip(cases, _on_ranks(stages, cases, options), strict=True)]
    head = (
        "stages",
        "schedule",
        "micro-batches",
        "m / (m + p - 1)",
        "planned",
        "measured",
        "step, ms",
        "off by",
    )
    print(markdown(head, rows))


def _as_asked(case: Case) -> tuple[Schedule, int, int]:
    return case.schedule, case.stages, case.micro_batches


def _row(case: Case, of_ranks: list[Steps]) -> tuple[object, ...]:
    """Returns the row of a case, from what its ranks have timed."""
    lengths: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for timed in (timed for steps in of_ranks for step in steps for timed in step):
        lengths[timed.kind, timed.stage].append(timed.ended - timed.began)

    def length(kind: Kind, stage: int) -> float:
        return mean(lengths.get((kind, stage), [0.0]))

    stages = [
        StageSeconds(length("F", stage), length("B", stage), length("I", stage), length("W", stage), send=0.0)
        for stage in range(case.stages * CHUNKS_PER_RANK[case.schedule])
    ]
    planned = played(case.schedule, case.stages, case.micro_batches, tuple(stages))
    seconds, shares = [], []
    for step in zip(*of_ranks, strict=True):
        passes = [timed for of_rank in step for timed in of_rank]
        seconds.append(max(timed.ended for timed in passes) - min(timed.began for timed in passes))
        busy = max(sum(timed.ended - timed.began for timed in of_rank) for of_rank in step)
        shares.append(busy / seconds[-1])
    m, p = case.micro_batches, case.stages
    return (
        p,
        case.schedule,
        m,
        f"{m / (m + p - 1):.1%}",
        f"{max(planned.busy) / planned.seconds:.1%}",
        f"{median(shares):.1%}",
        f"{1e3 * median(seconds):.1f}",
        f"{planned.seconds / median(seconds) - 1:+.1%}",
    )


def _on_ranks(stages: int, cases: Sequence[Case], options: Namespace) -> list[list[Steps]]:
    """Returns what fresh ranks have timed, by case and rank."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (stages, cases, options, folder)
        started = [context.Process(target=_on_rank, args=(rank, *arguments)) for rank in range(stages)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        assert [process.exitcode for process in started] == [0] * stages
        found = json.loads((Path(folder) / "timed.json").read_text())
    return [[[[Timed(*timed) for timed in step] for step in steps] for steps in case] for case in found]


def _on_rank(rank: int, stages: int, cases: Sequence[Case], options: Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    ranks = Ranks(rank, 1, stages)
    join(ranks, Path(folder), None, seconds=600)
    log, found, passes = open_log(StudyConfig(demo=DemoConfig(rows=20_000))), [], Passes([])
    note_passes(passes)
    for case in cases:
        passes.seconds = options.pass_ms / 1e3 / CHUNKS_PER_RANK[case.schedule]
        every: list[Any] = [None] * stages
        dist.all_gather_object(every, _timed(case, ranks, log, passes, options))
        found.append(every)
    if ranks.first:
        (Path(folder) / "timed.json").write_text(json.dumps(found))
    dist.barrier()
    # gloo's threads can end the process with `terminate called` while the interpreter is taken down
    os._exit(0)


def _timed(case: Case, ranks: Ranks, log: PreparedLog, passes: Passes, options: Namespace) -> Steps:
    """Returns the passes of this rank's steps."""
    layer = {"modules": [{"kind": "mlp", "mlp": [options.width]}], "out_embeddings": 8}
    model = parse_model({"embedding_dim": 16, "layers": [layer] * LAYERS, "dropout": 0.0}, "bubble")
    batch_size = options.examples * case.micro_batches
    training = TrainingConfig(batch_size=batch_size, precision="fp32", epochs=1)
    job = Job(model=model, features=log.features, log=log.fingerprint, training=training, seed=0)
    torch.manual_seed(0)
    strategy = Strategy(pipeline=case.stages, schedule=case.schedule, micro_batches=case.micro_batches)
    cluster = load_cluster("zionex").with_ranks(f"1x{case.stages}")
    built = build_model(model, log.features).train()
    step = DistributedStep(built, job, strategy, ranks, cluster, where=CPU)
    batches = train_batches(log.split("train"), batch_size=batch_size, seed=0, epoch=0)
    steps: Steps = []
    for batch in islice(cycle(islice(batches, DIFFERENT_BATCHES)), WARM_UP + options.steps):
        passes.timed.clear()
        dist.barrier()
        step(batch)
        steps.append(list(passes.timed))
    return steps[WARM_UP:]


def note_passes(passes: Passes) -> None:
    """Has this process note each pass of its stages."""
    for name in (FORWARD, BACKWARD, WEIGHTS):
        setattr(PipelineStage, name, _noted(getattr(PipelineStage, name), name, passes))


def _noted(run: Callable[..., Any], name: str, passes: Passes) -> Callable[..., Any]:
    def noted(stage: PipelineStage, number: int, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = run(stage, number, *args, **kwargs)
        kind: Kind = "F" if name == FORWARD else "W"
        if name == BACKWARD:
            kind = "B" if kwargs.get("full_backward", True) else "I"
        least = passes.seconds * (2 if kind == "B" else 1)
        time.sleep(max(0.0, began + least - time.perf_counter()))
        passes.timed.append(Timed(kind, stage.stage_index, began, time.perf_counter()))
        return result

    return noted


if __name__ == "__main__":
    main()
