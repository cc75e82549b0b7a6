"""Where the time of a study goes: training, evaluation, starting, sampling, the ledger, MLflow and report.

Runs a study of 30 candidates on the demo log through the same driver as the command line.

    python benchmarks/overhead.py [--rows 100000] [--trials 30]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import machine, markdown
from rich.console import Console

from search.config import DemoConfig, StudyConfig
from search.log import open_log
from search.proposals import Proposals
from search.study import Study, Watchers
from search.verbs.run import Publisher
from trials.launcher import Launcher
from trials.ledger import Ledger


class Stopwatch:
    """Seconds spent in functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--trials", type=int, default=30)
    arguments = parser.parse_args()
    config = StudyConfig(demo=DemoConfig(rows=arguments.rows), trials=arguments.trials)
    log = open_log(config)
    watch = Stopwatch()
    Proposals.ask = watch.around("sampling", Proposals.ask)  # type: ignore[method-assign]
    Proposals.tell = watch.around("sampling", Proposals.tell)  # type: ignore[method-assign]
    Ledger.save = watch.around("ledger", Ledger.save)  # type: ignore[method-assign]
    launcher = Launcher()
    launcher.warm_up()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        publisher = watch.around("MLflow and report", Publisher(directory, Console(quiet=True)))
        began = time.perf_counter()
        record = Study(config, directory, log, launcher, Watchers(publish=publisher)).run()
        wall = time.perf_counter() - began
    seconds = {
        "training": sum(trial.train_seconds or 0.0 for trial in record.trials),
        "evaluation": sum(trial.evaluate_seconds or 0.0 for trial in record.trials),
    }
    trials = sum(trial.seconds or 0.0 for trial in record.trials)
    seconds["starting and ending processes"] = trials - sum(seconds.values())
    seconds |= watch.seconds
    seconds["test scores and the rest"] = wall - sum(seconds.values())
    outside = wall - seconds["training"] - seconds["evaluation"]
    print(machine())
    print(f"{len(record.trials)} trials on {arguments.rows:,} rows, {wall:,.0f} s")
    rows = [[name, f"{value:.1f}", f"{value / wall:.1%}"] for name, value in seconds.items()]
    print(markdown(["what", "seconds", "share"], rows))
    print(f"outside training and evaluation: {outside / wall:.1%}")


if __name__ == "__main__":
    main()
