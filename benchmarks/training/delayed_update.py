"""What ZeRO-Offload's delayed update costs in NE: the same trainings with the delay and without, seed by seed.

Every training is held by `zero_offload` on one rank. A repeat trains without delay and with it from the same seed.
The difference of the best validation NE is to no delay in the same repeat; two trainings without delay that differ
in the seed alone say how large a difference is by chance.

    python -m benchmarks.training.delayed_update
        the demo log, five seeds, two networks
    python -m benchmarks.training.delayed_update log.csv --repeats 10 --layers 4
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.shared.log_or_demo import log_or_demo
from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.config import ModelConfig
from dhen.model import parse_model
from search.execution.trainer import job_on
from trials.cluster.machine import Precision
from trials.data.prepared_log import PreparedLog
from trials.records.events import DivergenceEvent, Event, TrainingEvent
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy
from trials.training.loop import train

SETTINGS: dict[str, dict[str, object]] = {
    "no delay": {},
    "delay after 40 steps": {"delayed_update": True},
}


def network(layers: int, dim: int) -> ModelConfig:
    """Pairwise dots beside DCN-V2 cross layers."""
    layer = {
        "modules": [{"kind": "dlrm", "rank": 16, "mlp": [256, 128]}, {"kind": "dcn_v2", "layers": 2}],
        "out_embeddings": 8,
        "ensemble": "concat",
    }
    return parse_model({"embedding_dim": dim, "layers": [layer] * layers}, "benchmark")


def trained(
    model: ModelConfig, log: PreparedLog, training: TrainingConfig, seed: int, to: Precision
) -> float:
    """The best NE on validation, infinite where the training diverged."""
    ends: list[float] = []

    def hear(event: Event) -> None:
        if isinstance(event, TrainingEvent):
            ends.append(event.best.ne)
        elif isinstance(event, DivergenceEvent):
            ends.append(float("inf"))

    job = job_on(log, model, training, seed, to)
    offload = Strategy(dense="zero_offload")
    train(job, log, hear, keep=lambda _: None, progress_seconds=1e9, strategy=offload)
    return ends[-1]


def row(name: str, found: Sequence[float], plain: Sequence[float]) -> list[str]:
    """A setting beside no delay: NE, and by how much it is higher, in percent, seed by seed."""
    more = [100 * (ne / other - 1) for ne, other in zip(found, plain, strict=True)]
    spread = f"{min(more):+.3f} to {max(more):+.3f}" if name != "no delay" else "–"
    mean = f"{statistics.mean(more):+.3f}" if name != "no delay" else "–"
    return [name, f"{statistics.mean(found):.5f}", mean, spread]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", nargs="*", type=Path, help="by default the demo log")
    parser.add_argument("--rows", type=int, default=200_000, help="of the demo log")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, help="by default that of a study")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    log = log_or_demo([*map(str, options.log)], options.rows)
    print(machine())
    for layers in options.layers:
        model = network(layers, options.dim)
        found: dict[str, list[float]] = {name: [] for name in SETTINGS}
        for seed in range(options.repeats):
            for name, setting in SETTINGS.items():
                training = TrainingConfig.model_validate({"batch_size": options.batch} | setting)
                found[name].append(trained(model, log, training, seed, options.precision))
                print(f"{layers} layers, seed {seed}, {name}: NE {found[name][-1]:.5f}", file=sys.stderr)
        plain = found["no delay"]
        apart = [100 * abs(a / b - 1) for a, b in pairwise(plain)]
        by_chance = f"; two seeds are {statistics.mean(apart):.3f} % apart" if apart else ""
        print(
            f"\n{layers} layers, {log.split('train').rows:,} training rows, {options.repeats} seeds{by_chance}"
        )
        header = ["update", "validation NE", "more than without, %", "from seed to seed"]
        print(f"\n{markdown(header, [row(name, nes, plain) for name, nes in found.items()])}", flush=True)


if __name__ == "__main__":
    main()
