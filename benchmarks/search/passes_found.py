"""Whether `training.epochs=auto` finds the right number of passes, beside fixed numbers.

For each log the number is found with the first network, as a study does with its baseline; then every network is
trained with it, and with fixed numbers: one pass, whose learning rates fall to zero, or several at constant ones,
the best weights counting. As rates are constant, one training with the largest number tells what fewer passes
bring. The cost is in passes; what finding the number costs is told apart.

    python -m benchmarks.search.passes_found demo demo.rows=200000
    python -m benchmarks.search.passes_found log.csv.gz --most 12 --networks advanced_dlrm dcn_v2
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping

import torch

from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.model import named_model
from search.config import read_study_config
from search.dataset import open_log
from search.execution.passes import NEARLY, PassFinder
from search.execution.reduce_events import reduce_event
from search.execution.trainer import job_on, new_record
from spaces.space import Point
from trials.data.prepared_log import PreparedLog
from trials.records.events import Event
from trials.records.job import TrainingConfig
from trials.records.trial_record import TrialKind, TrialRecord
from trials.training.loop import train

FIXED = (2, 3, 4, 6, 8, 12, 16)
PATIENT = 1_000_000
"""Evaluations without a better NE that a fixed number of passes is trained through."""


def lowest_ne(record: TrialRecord, passes: float = math.inf) -> float:
    """The lowest NE on validation within so many passes."""
    return min(point.validation.ne for point in record.result.curve if point.epoch < passes + NEARLY)


def cost(record: TrialRecord) -> float:
    """Passes until the training ended."""
    return record.result.curve[-1].epoch


def trained(log: PreparedLog, network: str, training: TrainingConfig, seed: int) -> TrialRecord:
    """The record of one training in this process."""
    job = job_on(log, named_model(network), training, seed, "fp32")
    record = new_record(0, TrialKind.BASELINE, {}, job)

    def hear(event: Event) -> None:
        nonlocal record
        record = reduce_event(record, event)

    train(job, log, hear, keep=lambda _: None, progress_seconds=1e9)
    return record


def main() -> None:
    """Prints what was found, and a row for each network."""
    options = _options()
    torch.set_num_threads(1)
    log = open_log(read_study_config(None, options.settings, data=(options.log,)), print)
    print(f"{machine()}; {log.manifest.rows['train']:,} training rows, seed {options.seed}\n")
    passes, trials = PassFinder(TrainingConfig(), minutes=None), dict[int, TrialRecord]()

    def train_baseline(points: Mapping[int, Point]) -> None:
        for number, point in points.items():
            settings = {key.removeprefix("training."): value for key, value in point.items()}
            training = TrainingConfig.model_validate(settings)
            trials[number] = trained(log, options.networks[0], training, options.seed)

    passes.find(trials, train_baseline)
    assert passes.found is not None
    spent = sum(map(cost, trials.values()))
    print(f"found: {passes.found.passes} pass(es), in {spent:.1f}; {passes.found}\n")
    fixed = [1, *(number for number in FIXED if number <= options.most)]
    heads = [
        "network",
        "auto",
        "its passes",
        "behind the best fixed number",
        *(f"{number}" for number in fixed),
    ]
    print(markdown(heads, [_row(log, network, passes, fixed, options.seed) for network in options.networks]))


def _row(log: PreparedLog, network: str, passes: PassFinder, fixed: list[int], seed: int) -> list[str]:
    """A network's NE with the number that was found and with fixed ones."""
    auto = trained(log, network, passes.applied(passes.decayed(TrainingConfig())), seed)
    one = trained(log, network, TrainingConfig(epochs=1), seed)
    several = trained(log, network, TrainingConfig(epochs=fixed[-1], patience=PATIENT), seed)
    nes = [lowest_ne(one), *(lowest_ne(several, number) for number in fixed[1:])]
    behind = 100.0 * (lowest_ne(auto) / min(nes) - 1.0)
    return [
        network,
        f"{lowest_ne(auto):.5f}",
        f"{cost(auto):.1f}",
        f"{behind:+.2f} %",
        *(f"{ne:.5f}" for ne in nes),
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", help="a log file, or demo")
    parser.add_argument("settings", nargs="*", help="of the log, such as demo.rows=200000")
    parser.add_argument("--networks", nargs="+", default=["advanced_dlrm", "dcn_v2", "dlrm"])
    parser.add_argument("--most", type=int, default=8, help="largest fixed number of passes")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
