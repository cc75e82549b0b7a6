"""How far predicted seconds of steps are off, as trainings that end on this machine correct them.

    python -m benchmarks.planner.corrected_seconds
    python -m benchmarks.planner.corrected_seconds --candidates 30 space=wide parallel=1

A study of small candidates on the built-in log, with a cache in which no training has ended yet. A row for each
training: what the roofline says, what was predicted when it was planned, what a step took. If a study trains side
by side, a plan is made before the trainings beside it have ended.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shared.machine_and_tables import machine, markdown
from dashboards.names import short_name
from search.execution.step_correction import ENOUGH
from search.read_study import read_study

COLUMNS = ("training", "network", "roofline, ms", "predicted, ms", "measured, ms", "off")
STUDY = ("baseline_trials=2", "training.epochs=1", "averages=0", "confirm=0", "tune=0")


def trained(
    rows: int, candidates: int, words: Sequence[str], folder: Path
) -> list[tuple[str, float, float, float]]:
    """Networks with the seconds of a step by the roofline, as predicted and as measured, in the order of plans."""
    run = [
        str(Path(sys.executable).parent / "dhen-search"),
        "run",
        f"demo.rows={rows}",
        f"trials={candidates}",
    ]
    environment = os.environ | {"DHEN_SEARCH_CACHE": str(folder / "cache")}
    study = [*run, *STUDY, *words, "--out", str(folder / "study")]
    subprocess.run(study, check=True, stdout=subprocess.DEVNULL, env=environment)
    found = []
    for trial in read_study(folder / "study").trials:
        for attempt in trial.attempts:
            roofline = attempt.plan.whole_step_seconds if attempt.plan is not None else None
            predicted, measured = attempt.predicted_step_seconds, attempt.measured_step_seconds
            if roofline and predicted and measured:
                found.append((short_name(trial.job.model), roofline, predicted, measured))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--candidates", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = trained(arguments.rows, arguments.candidates, arguments.words, Path(folder))
    off = [measured / predicted - 1 for _, _, predicted, measured in steps]
    by_roofline = [measured / roofline - 1 for _, roofline, _, measured in steps]
    rows = [
        [number, network, *(f"{1e3 * each:.1f}" for each in seconds), f"{100 * error:+.0f} %"]
        for number, ((network, *seconds), error) in enumerate(zip(steps, off, strict=True), 1)
    ]
    print(
        f"{machine()}, load {os.getloadavg()[2]:.1f}; {' '.join(arguments.words)}\n\n{markdown(COLUMNS, rows)}\n"
    )
    for name, errors in (("predicted", off), ("roofline", by_roofline)):
        if later := [abs(error) for error in errors[ENOUGH:]]:
            median, worst = 100 * statistics.median(later), 100 * max(later)
            print(f"{name}, after {ENOUGH} trainings: off by {median:.1f} % (median), {worst:.0f} % at worst")


if __name__ == "__main__":
    main()
