"""What interaction modules, ensembles, norms and shortcuts bring: one thing changed at a time, on one log.

Two equal layers of each module alone, of each beside DCN-V2, and of an MLP beside DCN-V2 in each other kind of
layer. NE on validation, in percent of the group's reference, paired by seed.

    python -m benchmarks.models.modules_and_norms log.csv [more files] [--seeds 3] [--demo-rows 100000]
        [--groups alone] [--networks linear dlrm] [--raw FILE.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.models.one_network import network_flops, parsed, stacked, validation_ne
from benchmarks.shared.log_or_demo import log_or_demo
from benchmarks.shared.machine_and_tables import beside, machine, markdown, spread
from dashboards.names import short_name
from dhen.blocks import BLOCKS
from dhen.ensembles import ENSEMBLES
from trials.data.prepared_log import PreparedLog
from trials.records.job import TrainingConfig
from trials.runtime.launcher import Launcher

TRAINING = TrainingConfig(weight_average=4)
PARTNER = "dcn_v2"
PAIR = ("mlp", PARTNER)
ALONE, BESIDE, LAYER = "alone", f"beside {PARTNER}", f"layers of {' and '.join(PAIR)}"
LAYERS: dict[str, dict[str, Any]] = {
    **{f"ensemble {kind}": {"ensemble": kind} for kind in ENSEMBLES},
    "norm rms": {"norm": "rms"},
    "norm none": {"norm": "none"},
    "pre-norm": {"norm_placement": "pre"},
    "no shortcut": {"shortcut": False},
    "raw numbers": {"raw_numeric": True},
    "buckets apart": {"buckets": "apart"},
    "buckets interpolated": {"buckets": "interpolated"},
    "4 members": {"members": 4},
}


def groups() -> Iterator[tuple[str, str, dict[str, dict[str, Any]]]]:
    """What is compared: its title, the name of its reference, networks by name."""
    yield ALONE, "mlp", {kind: stacked(kind) for kind in BLOCKS}
    yield (
        BESIDE,
        f"{PARTNER} alone",
        {
            f"{PARTNER} alone": stacked(PARTNER),
            **{kind: stacked(kind, PARTNER) for kind in BLOCKS},
        },
    )
    yield (
        LAYER,
        "ensemble sum",
        {name: stacked(*PAIR, **others) for name, others in LAYERS.items()},
    )


def table(
    log: PreparedLog, seeds: int, wanted: Sequence[str], names: Sequence[str] | None
) -> tuple[list[list[str]], dict[str, Any]]:
    """A row per network; NE by group and name. `names`: those wanted beside each group's reference."""
    launcher, rows, raw = Launcher(), [], {}
    for title, reference, networks in groups():
        if title not in wanted:
            continue
        found = {}
        others = [each for each in networks if each != reference and (names is None or each in names)]
        for name in (reference, *others):
            model = parsed(networks[name])
            found[name] = [validation_ne(log, launcher, model, TRAINING, seed) for seed in range(seeds)]
            row = [title, name, short_name(model.to_dict()), spread(found[name], digits=4)]
            row += [beside(found[name], found[reference]), f"{network_flops(model, log):,.0f}"]
            print(*row, file=sys.stderr, flush=True)
            rows.append(row)
        raw[title] = found
    return rows, raw


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--demo-rows", type=int, default=100_000)
    parser.add_argument("--groups", nargs="+", default=[ALONE, BESIDE, LAYER], choices=[ALONE, BESIDE, LAYER])
    parser.add_argument("--networks", nargs="+", help="of each group, beside its first; all where not given")
    parser.add_argument("--raw", type=Path, help="where NE of each seed goes")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds: a spread needs two at least")
    log = log_or_demo(options.data, options.demo_rows)
    rows, raw = table(log, options.seeds, options.groups, options.networks)
    if options.raw:
        options.raw.write_text(json.dumps(raw))
    print(machine())
    header = ["group", "what", "network", "validation NE", "of the group's first", "FLOPs"]
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
