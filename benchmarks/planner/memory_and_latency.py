"""How fast the planner answers, and how far its memory is from traces and from real training steps.

    python -m benchmarks.planner.memory_and_latency latency
        the whole ladder for deep candidates, and a thousand
    python -m benchmarks.planner.memory_and_latency accuracy --cases 320
        against traces of the wrapped model under fake tensors
    python -m benchmarks.planner.memory_and_latency real
        against what real steps of one process hold, tables included

`accuracy` draws architectures from every named space, strategies, worlds of 1 to 256 ranks, batches and both
precisions; constants beside tensors are left out, and below 64 MiB an error of 1 MiB counts as none. Every
case is written down (--out), so that a part of them can be run at a time (--seed).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import track

from benchmarks.reference.step_trace import trace
from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.batch import FeatureBatch
from dhen.config import ModelConfig
from dhen.inputs.lift import table_dims
from dhen.model import build_model, named_model
from dhen.ops.norm import pools
from dhen.schema import FeatureSchema, Table
from spaces.space import catalog, load_space
from trials.cluster.cluster import Cluster
from trials.cluster.machine import Precision
from trials.cluster.this_machine import load_cluster, this_machine
from trials.data.loader import LabelledBatch
from trials.planner.choice import PricedLadder
from trials.planner.ladder import ladder
from trials.planner.memory import DensePeak, dense_peak, recomputed
from trials.planner.memory_counter import MemoryCounter
from trials.planner.plan import plan
from trials.planner.segments import segments_at, taped
from trials.planner.zero_memory import Activations, DenseRank, Itemsizes, RankInput
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy, data_ranks
from trials.training.step import TrainStep

WORLDS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8))
BATCHES = (64, 256, 1024, 4096)
"""Examples a rank."""
LATENCY_RANKS = "32x8", "128x8"
BASELINES = ("advanced_dlrm", "advanced_dlrm_moe", "dcn_v2")
SMALL_BYTES, SMALL_ERROR_BYTES = 64 * 2**20, 2**20


class Case(NamedTuple):
    """What is estimated and traced."""

    space: str
    model: ModelConfig
    inputs: FeatureSchema
    strategy: Strategy
    hosts: int
    gpus_per_host: int
    examples_per_rank: int
    precision: Precision


def schema(rng: random.Random) -> FeatureSchema:
    """Tables and numbers of a log; rows do not matter to the dense part."""
    one_hot = [Table(name=f"c{i}", rows=rng.choice((100, 5000))) for i in range(rng.choice((4, 10, 26)))]
    bags = [Table(name=f"b{i}", rows=100, multi_hot=True, mean_ids=3) for i in range(rng.choice((0, 0, 3)))]
    return FeatureSchema(
        tables=(*one_hot, *bags), numeric=tuple(f"n{i}" for i in range(rng.choice((1, 5, 13))))
    )


def candidate(
    rng: random.Random, depth: int | None = None, names: tuple[str, ...] = ()
) -> tuple[str, ModelConfig]:
    """A model of a named space, or now and then a baseline."""
    name = rng.choice(names or (*catalog(), "baseline"))
    if name == "baseline":
        name = rng.choice(BASELINES)
        return name, named_model(name)
    space = load_space(name)
    point = space.random_point(rng)
    if depth is not None:
        point["depth"] = depth
    return name, space.decode(point).model


def latency(repeats: int, candidates: int) -> None:
    """Milliseconds per plan: of layers each with its own recipe, and many candidates as they come."""
    rng, rows = random.Random(0), []
    inputs, training = schema(rng), TrainingConfig(batch_size=65_536, precision="bf16")
    for ranks in LATENCY_RANKS:
        cluster = load_cluster("zionex").with_ranks(ranks)
        for depth in (1, 2, 4, 8):
            found = [
                _planned(candidate(rng, depth, ("wide",))[1], inputs, training, cluster)
                for _ in range(repeats + 1)
            ][1:]
            each = [one.seconds for one in found]
            wholes = [one.whole for one in found]
            times = statistics.median(each), max(each), statistics.median(wholes)
            looked_at = f"{statistics.median(one.looked_at for one in found):.0f}"
            ms = [f"{1e3 * one:.1f}" for one in times]
            rows.append((cluster.ranks, depth, found[0].strategies, looked_at, *ms))
    print("plans of `wide` candidates; milliseconds\n")
    header = ("ranks", "layers", "strategies", "looked at", "median", "slowest")
    print(markdown((*header, "whole ladder"), rows))
    cluster = load_cluster("zionex").with_ranks("32x8")
    models = [candidate(rng, names=("default", "wide", "tiny"))[1] for _ in range(candidates)]
    began = time.perf_counter()
    for model in models:
        plan(model, inputs, training, cluster)
    seconds = time.perf_counter() - began
    print(f"\n{candidates:,} candidates of the spaces default, wide and tiny: {seconds:.1f} s")


class Timed(NamedTuple):
    """One plan."""

    seconds: float
    whole: float
    """Seconds until the whole ladder is priced."""
    strategies: int
    looked_at: int


def _planned(model: ModelConfig, inputs: FeatureSchema, training: TrainingConfig, cluster: Cluster) -> Timed:
    """One plan, and then all of its ladder."""
    began = time.perf_counter()
    found = plan(model, inputs, training, cluster)
    seconds, priced = time.perf_counter() - began, found.strategies
    assert isinstance(priced, PricedLadder)
    looked_at = priced.looked_at
    list(priced)
    return Timed(seconds, time.perf_counter() - began, len(priced), looked_at)


def accuracy(cases: int, seed: int, out: Path | None) -> None:
    """The composed estimate over the trace, case by case."""
    rng = random.Random(seed)
    found = [compare(case) for case in track([_case(rng) for _ in range(cases)], "tracing")]
    if out is not None:
        out.write_text("\n".join(map(json.dumps, found)) + "\n")
    summarize(found)


def _case(rng: random.Random) -> Case:
    space, model = candidate(rng)
    hosts, gpus = rng.choice(WORLDS)
    examples = rng.choice(BATCHES)
    precision: Precision = rng.choice(("fp32", "bf16"))
    inputs = schema(rng)
    return Case(
        space, model, inputs, rng.choice(ladder(hosts, gpus, examples)), hosts, gpus, examples, precision
    )


def compare(case: Case) -> dict[str, Any]:
    """Both totals and where their peaks are."""
    traced = trace(
        case.model,
        case.inputs,
        case.strategy,
        hosts=case.hosts,
        gpus_per_host=case.gpus_per_host,
        examples_per_rank=case.examples_per_rank,
        training=TrainingConfig(precision=case.precision),
    )
    estimate = composed(case)
    return {
        "space": case.space,
        "layers": len(getattr(case.model, "layers", ())),
        "strategy": case.strategy.name,
        "dense": case.strategy.dense,
        "ranks": case.hosts * case.gpus_per_host,
        "examples": case.examples_per_rank,
        "precision": case.precision,
        "traced": traced.total,
        "estimate": estimate.total,
        "traced_at": traced.peak_at,
        "estimate_at": estimate.moment.at,
    }


def composed(case: Case) -> DensePeak:
    """The dense part as the planner has it, with the inputs that a trace is given."""
    examples = case.examples_per_rank
    micro = -(-examples // case.strategy.micro_batches)
    width = 4 * sum(table_dims(case.model, case.inputs))
    tensor = case.strategy.tensor
    written = taped(case.model, case.inputs, case.precision, "cpu", tensor)
    found = segments_at(written, case.precision, micro)
    hosts, per_host = data_ranks(tensor, case.hosts, case.gpus_per_host)
    rank = DenseRank(
        found,
        Activations(found, recomputed(found, case.strategy)),
        case.strategy,
        RankInput(width * examples, width * micro, 4 * examples * (len(case.inputs.numeric) + 1)),
        Itemsizes.of(TrainingConfig(precision=case.precision)),
        hosts,
        per_host,
    )
    return dense_peak(rank)


def summarize(found: list[dict[str, Any]]) -> None:
    """Errors in percent of the trace, all together and by how the dense part is held."""
    rows = []
    for dense in ("all", *sorted({case["dense"] for case in found})):
        errors = [error(case) for case in found if dense in ("all", case["dense"])]
        sizes = sorted(map(abs, errors))
        at = sizes[min(round(0.95 * len(sizes)), len(sizes) - 1)]
        middle = statistics.median(sizes)
        rows.append(
            [dense, len(errors), f"{middle:.2f}", f"{at:.2f}", f"{min(errors):+.2f}", f"{max(errors):+.2f}"]
        )
    print(
        markdown(("held by", "cases", "median |error| %", "95th percentile", "most under", "most over"), rows)
    )
    plain = [100 * (case["estimate"] / case["traced"] - 1) for case in found]
    sizes = sorted(map(abs, plain))
    print(
        f"\nwithout the allowance below 64 MiB: median {statistics.median(sizes):.2f} %, "
        f"95th percentile {sizes[round(0.95 * len(sizes)) - 1]:.2f} %, {min(plain):+.2f} to {max(plain):+.2f} %"
    )


def error(case: dict[str, Any]) -> float:
    """Percent of the trace; 0 within 1 MiB of a trace below 64 MiB."""
    difference = case["estimate"] - case["traced"]
    if case["traced"] < SMALL_BYTES and abs(difference) <= SMALL_ERROR_BYTES:
        return 0.0
    return float(100.0 * difference / case["traced"])


def real(cases: int, seed: int) -> None:
    """Steps of `trials.training.step.TrainStep` on this machine: model, tables and optimizers of one
    process."""
    rng, cluster, errors, rows = random.Random(seed), this_machine(), [], []
    for _ in track(range(cases), "training"):
        name, model = candidate(rng)
        inputs, examples = schema(rng), rng.choice((256, 1024, 4096))
        precision: Precision = rng.choice(("fp32", "bf16"))
        training = TrainingConfig(batch_size=examples, precision=precision)
        estimate = plan(model, inputs, training, cluster).strategies[0].memory
        held = step_bytes(model, inputs, training, examples)
        errors.append(100 * (estimate.total / held - 1))
        rows.append(
            [name, examples, precision, f"{held / 2**20:.1f}", f"{errors[-1]:+.2f}", estimate.peak_at]
        )
    print(markdown(("model", "batch", "precision", "MiB held", "estimate %", "at"), rows))
    sizes = sorted(map(abs, errors))
    print(f"\nmedian |error| {statistics.median(sizes):.2f} %, {min(errors):+.2f} to {max(errors):+.2f} %")


def step_bytes(model: ModelConfig, inputs: FeatureSchema, training: TrainingConfig, examples: int) -> int:
    """The peak of a training step after the first, counted tensor by tensor, with the next batch beside its own as
    in a training."""
    torch.manual_seed(0)
    pools()
    with MemoryCounter() as counter:
        step = TrainStep(build_model(model, inputs).train(), training)
        batches = [random_batch(inputs, examples) for _ in range(2)]
        step(batches[0])
        counter.start_over("step")
        step(batches[1])
        return counter.peak


def random_batch(inputs: FeatureSchema, examples: int) -> LabelledBatch:
    """Ids drawn evenly; as many in each bag as the table says on average."""
    ids = [torch.randint(table.rows, (examples,), dtype=torch.int32) for table in inputs.categorical]
    bags = tuple(
        (
            torch.randint(table.rows, (round(examples * table.mean_ids),), dtype=torch.int32),
            torch.arange(examples, dtype=torch.int32) * round(table.mean_ids),
        )
        for table in inputs.multi_hot
    )
    features = FeatureBatch(
        ids_BT=torch.stack(ids, dim=1), bags=bags, numeric_BK=torch.randn(examples, len(inputs.numeric))
    )
    return LabelledBatch(features=features, label_B=torch.randint(2, (examples,)).float(), weight_B=None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("latency", "accuracy", "real"))
    parser.add_argument("--cases", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--candidates", type=int, default=1000, help="of `latency`, all together")
    parser.add_argument("--out", type=Path, help="every case of `accuracy`, a JSON object a line")
    options = parser.parse_args()
    print(f"{machine()}\n")
    if options.what == "latency":
        latency(options.repeats, options.candidates)
    elif options.what == "accuracy":
        accuracy(options.cases, options.seed, options.out)
    else:
        real(min(options.cases, 24), options.seed)


if __name__ == "__main__":
    main()
