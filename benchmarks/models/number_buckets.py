"""What buckets of numbers bring: the same networks on a log prepared with and without them.

    python -m benchmarks.models.number_buckets log.csv [more files] [--seeds 3] [--counts 16 64 256]

Networks are trained for one epoch with the default settings and averages of weights; NE is on validation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.models.one_network import network_flops, parsed, stacked, validation_ne
from benchmarks.shared.machine_and_tables import machine, markdown, spread
from dashboards.names import short_name
from dhen.config import ModelConfig
from trials.data.cache import PreparedLog
from trials.data.log_schema import LogSchema
from trials.data.prepare.prepare_log import prepare
from trials.data.roles.infer import infer_schema
from trials.job import TrainingConfig
from trials.processes.launcher import Launcher

TRAINING = TrainingConfig(weight_average=4)
NETWORKS = (
    {"family": "advanced_dlrm", "dropout": 0.1},
    stacked("dcn_v2"),
    stacked("dlrm", "linear", ensemble="concat", out_embeddings=8),
)


def with_buckets(schema: LogSchema, count: int | None) -> LogSchema:
    numeric = {name: column.replace(buckets=count) for name, column in schema.numeric.items()}
    return schema.replace(columns={**schema.columns, **numeric})


def networks(log: PreparedLog, most: int) -> Iterator[ModelConfig]:
    for data in NETWORKS[:most]:
        yield parsed(data)
        if log.features.bucketed:
            yield parsed(data | {"buckets": "apart"})


def table(files: Sequence[Path], counts: Sequence[int | None], seeds: int, most: int) -> list[list[str]]:
    """A row per network and way of its numbers."""
    schema, launcher = infer_schema(files), Launcher()
    rows = []
    for count in counts:
        log = prepare(files, schema=with_buckets(schema, count))
        for model in networks(log, most):
            found = [validation_ne(log, launcher, model, TRAINING, seed) for seed in range(seeds)]
            flops = f"{network_flops(model, log):,.0f}"
            rows.append([short_name(model.to_dict()), str(count or "none"), spread(found), flops])
            print(*rows[-1], file=sys.stderr, flush=True)
    return sorted(rows, key=lambda row: row[0].removesuffix(" buckets apart"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--counts", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument(
        "--networks", type=int, default=len(NETWORKS), help="how many of them, from the first"
    )
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds: a spread needs two at least")
    rows = table(options.data, [None, *options.counts], options.seeds, options.networks)
    print(machine())
    print(markdown(["network", "buckets", "validation NE", "FLOPs"], rows))


if __name__ == "__main__":
    main()
