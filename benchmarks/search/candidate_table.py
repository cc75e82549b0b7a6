"""A table of really trained candidates, from the ledgers of finished studies: what samplers are compared on.

    dhen-search run --out runs/table sampler=random grow=no trials=800 demo.rows=40000
    python -m benchmarks.search.candidate_table runs/table --out table.json

Several run directories, of one space and log, make one table; a network that is in two counts once. Numbers alone
are kept: the space, the log's schema, and of each candidate its point, cost, outcome, curve and seconds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.machine_and_tables import machine
from dhen.schema import FeatureSchema
from search.bundles.export import study_log
from search.config import written_config
from search.execution.growth import widen_again
from search.read_study import read_study
from spaces.space import Space, SpaceConfig, load_space
from trials.records.trial_record import Outcome, TrialRecord

KEPT = (Outcome.COMPLETED, Outcome.DIVERGED, Outcome.STOPPED, Outcome.INFEASIBLE, Outcome.OUT_OF_MEMORY)


def row(trial: TrialRecord) -> dict[str, Any]:
    """One candidate; NE is None if there is none."""
    ne = (
        trial.result.validation.ne
        if trial.result.validation and not math.isnan(trial.result.validation.ne)
        else None
    )
    return {
        "point": trial.point,
        "outcome": trial.result.outcome.value,
        "flops": trial.job.flops,
        "parameters": trial.job.parameters,
        "ne": ne,
        "curve": [
            [point.examples, round(point.seconds, 3), point.validation.ne]
            for point in trial.result.curve
            if not math.isnan(point.validation.ne)
        ],
        "seconds": trial.result.seconds,
        "memory_excess": trial.plan.memory_excess,
    }


def check_alike(directories: Sequence[Path]) -> dict[str, Any]:
    """The space and the log of all these studies; ends the program where one has others."""
    heads = [_head(directory) for directory in directories]
    for directory, head in zip(directories, heads, strict=True):
        if head != heads[0]:
            raise SystemExit(f"{directory} searched another space or log than {directories[0]}")
    return heads[0]


def _head(directory: Path) -> dict[str, Any]:
    features, record = study_log(directory).features, read_study(directory)
    space = widen_again(load_space(written_config(directory).space, features), record.grown)
    return {
        "space": space.config.to_dict(),
        "features": features.to_dict(),
        "log": record.log.model_dump(mode="json"),
    }


def table(directories: list[Path]) -> dict[str, Any]:
    """The studies' candidates together; those of another space or log are an error."""
    head = check_alike(directories)
    candidates: dict[str, dict[str, Any]] = {}
    for directory in directories:
        for trial in read_study(directory).candidates:
            if trial.result.outcome in KEPT and not trial.shared:
                candidates.setdefault(trial.job.fingerprint or json.dumps(trial.point), row(trial))
    return {"machine": machine(), **head, "candidates": list(candidates.values())}


def read_table(path: Path) -> tuple[Space, FeatureSchema, list[dict[str, Any]]]:
    """A table's space, schema and candidates."""
    data = json.loads(path.read_text())
    space = Space(path.stem, SpaceConfig.model_validate(data["space"]))
    return space, FeatureSchema.model_validate(data["features"]), data["candidates"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    found = table(options.studies)
    options.out.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    outcomes = Counter(candidate["outcome"] for candidate in found["candidates"])
    print(f"{options.out}: {dict(outcomes)}, {options.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
