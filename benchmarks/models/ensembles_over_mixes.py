"""Which ensemble is best: the question that the DHEN paper leaves open, over ten mixes of interaction modules.

Two layers of each mix, their outputs joined by concat, sum, weighted sum or gates. NE on validation in percent of
the sum's, paired by mix and seed; over mixes a t-interval with as many degrees of freedom as there are mixes less
one. What is trained is kept in a file, and not trained again.

    python -m benchmarks.models.ensembles_over_mixes demo --out demo.jsonl [--demo-rows 100000]
    python -m benchmarks.models.ensembles_over_mixes log.csv --out log.jsonl --passes 3 [--seeds 5] [--mixes 10]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.models.one_network import network_flops, parsed, stacked, validation_ne
from benchmarks.shared.kept_trainings import half_interval, keep, kept
from benchmarks.shared.log_or_demo import log_or_demo
from benchmarks.shared.machine_and_tables import machine, markdown
from trials.data.prepared_log import PreparedLog
from trials.records.job import TrainingConfig
from trials.runtime.launcher import Launcher

MIXES: tuple[tuple[str, ...], ...] = (
    ("dlrm", "linear"),
    ("dcn_v2", "mlp"),
    ("attention", "linear"),
    ("dcn_v2", "dlrm"),
    ("attention", "conv"),
    ("dlrm", "mlp"),
    ("dcn_v2", "linear"),
    ("mask_block", "dcn_v2"),
    ("dcn_v2", "dlrm", "linear"),
    ("attention", "conv", "mlp"),
)
KINDS = ("sum", "weighted_sum", "gated", "concat")
REFERENCE = "sum"

Nes = dict[tuple[tuple[str, ...], str, int], float]
"""NE by mix, kind of ensemble and seed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains what is not in the file yet, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="where each training's NE is kept")
    parser.add_argument("--demo-rows", type=int, default=100_000)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--mixes", type=int, default=len(MIXES), help="the first so many")
    options = parser.parse_args(arguments)
    if options.mixes < 2:
        parser.error("--mixes: an interval over mixes needs two at least")
    log, mixes = log_or_demo(options.data, options.demo_rows), MIXES[: options.mixes]
    found = trained(log, mixes, options.seeds, options.passes, options.out)
    passes = f"{options.passes} pass{'es' if options.passes > 1 else ''}"
    print(
        f"{machine()}; {log.manifest.rows['train']:,} training rows, {passes}, seeds 0 to {options.seeds - 1}\n"
    )
    print(table(log, mixes, found, options.seeds))


def trained(log: PreparedLog, mixes: Sequence[tuple[str, ...]], seeds: int, passes: int, out: Path) -> Nes:
    """NE of all networks; the file's lines count where they are of this log and as many passes."""
    found: Nes = {}
    settings = {"log": log.fingerprint, "passes": passes}
    for line in kept(out, settings):
        found[tuple(line["mix"]), line["ensemble"], line["seed"]] = line["ne"]
    launcher, training = Launcher(), TrainingConfig(epochs=passes)
    for seed in range(seeds):  # seed by seed: what is there after an interruption is a table of fewer seeds
        for mix in mixes:
            for kind in KINDS:
                if (mix, kind, seed) in found:
                    continue
                ne = validation_ne(log, launcher, parsed(stacked(*mix, ensemble=kind)), training, seed)
                found[mix, kind, seed] = ne
                keep(out, {**settings, "mix": mix, "ensemble": kind, "seed": seed, "ne": ne})
                print(*mix, kind, seed, f"{ne:.5f}", file=sys.stderr, flush=True)
    return found


def table(log: PreparedLog, mixes: Sequence[tuple[str, ...]], found: Nes, seeds: int) -> str:
    """A row per kind of ensemble: to the sum over all mixes, in how many it is best, and its FLOPs."""
    by_kind = {
        kind: np.array([[found[mix, kind, seed] for seed in range(seeds)] for mix in mixes]) for kind in KINDS
    }
    means = np.stack([by_kind[kind].mean(axis=1) for kind in KINDS])
    best = np.bincount(means.argmin(axis=0), minlength=len(KINDS))
    rows = []
    for place, kind in enumerate(KINDS):
        percent = 100 * (by_kind[kind] / by_kind[REFERENCE] - 1).mean(axis=1)
        flops = [_flops(log, mix, kind) / _flops(log, mix, REFERENCE) for mix in mixes]
        to_sum = "" if kind == REFERENCE else f"{percent.mean():+.2f} ± {half_interval(percent):.2f} %"
        spread = "" if kind == REFERENCE else f"{percent.min():+.2f} to {percent.max():+.2f} %"
        rows.append(
            [kind, f"{by_kind[kind].mean():.5f}", to_sum, spread, best[place], f"{np.mean(flops):.2f}"]
        )
    header = ["ensemble", "NE, mean", "to the sum", "by mix", "best in mixes", "FLOPs to the sum's"]
    return markdown(header, rows)


def _flops(log: PreparedLog, mix: tuple[str, ...], kind: str) -> float:
    return network_flops(parsed(stacked(*mix, ensemble=kind)), log)


if __name__ == "__main__":
    main()
