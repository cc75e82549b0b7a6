"""What buckets of numbers bring: the same networks on a log prepared with and without them, summed, apart and
interpolated.

    python -m benchmarks.models.number_buckets log.csv [more files] [--seeds 3] [--counts 16 64 256] [--passes 1]
    python -m benchmarks.models.number_buckets demo --demo-rows 60000

Networks are trained with the default settings and averages of weights; NE is on validation, and beside that of the
same network with its buckets apart, in pairs of one seed each, with the standard error of their mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.models.one_network import network_flops, parsed, stacked, validation_ne
from benchmarks.shared.machine_and_tables import beside, machine, markdown, spread
from dashboards.names import short_name
from dhen.config import ModelConfig
from search.dataset import log_files
from search.log_config import DemoConfig
from trials.data.log_schema import LogSchema
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.data.roles.infer import infer_schema
from trials.records.job import TrainingConfig
from trials.runtime.launcher import Launcher

WAYS = ("apart", "interpolated")
NETWORKS = (
    {"family": "advanced_dlrm", "dropout": 0.1},
    stacked("dcn_v2"),
    stacked("dlrm", "linear", ensemble="concat", out_embeddings=8),
    stacked("mlp", "dcn_v2", layers=1),
)


def with_buckets(schema: LogSchema, count: int | None) -> LogSchema:
    numeric = {name: column.replace(buckets=count) for name, column in schema.numeric.items()}
    return schema.replace(columns={**schema.columns, **numeric})


def networks(log: PreparedLog, most: int) -> Iterator[ModelConfig]:
    for data in NETWORKS[:most]:
        yield parsed(data)
        if log.features.bucketed:
            yield from (parsed(data | {"buckets": way}) for way in WAYS)


def table(
    files: Sequence[Path], counts: Sequence[int | None], seeds: int, most: int, training: TrainingConfig
) -> list[list[str]]:
    """A row per network and way of its numbers."""
    schema, launcher = infer_schema(files), Launcher()
    rows, nes = [], []
    for count in counts:
        log = prepare(files, schema=with_buckets(schema, count))
        for model in networks(log, most):
            found = [validation_ne(log, launcher, model, training, seed) for seed in range(seeds)]
            nes.append(found)
            flops = f"{network_flops(model, log):,.0f}"
            rows.append([short_name(model.to_dict()), str(count or "none"), spread(found), flops])
            print(*rows[-1], file=sys.stderr, flush=True)
    apart = {_place(row): found for row, found in zip(rows, nes, strict=True) if "apart" in row[0]}
    compared = [
        [*row, beside(found, apart[_place(row)]) if _place(row) in apart else ""]
        for row, found in zip(rows, nes, strict=True)
    ]
    return sorted(compared, key=lambda row: row[0].split(" buckets ")[0])


def _place(row: list[str]) -> tuple[str, str]:
    """The network of a row without the way of its buckets, and their number."""
    return row[0].split(" buckets ")[0], row[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+", help="files of a log, or demo")
    parser.add_argument("--demo-rows", type=int, default=100_000)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--counts", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument(
        "--networks", type=int, default=len(NETWORKS), help="how many of them, from the first"
    )
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds: a spread needs two at least")
    files = log_files(options.data, DemoConfig(rows=options.demo_rows))
    training = TrainingConfig(weight_average=4, epochs=options.passes)
    rows = table(files, [None, *options.counts], options.seeds, options.networks, training)
    print(machine())
    print(markdown(["network", "buckets", "validation NE", "FLOPs", "beside apart"], rows))


if __name__ == "__main__":
    main()
