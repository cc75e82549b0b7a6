"""Candidates side by side have the same results as alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from command_line import SMALL, Run

from search.read_study import read_study
from trials.records.trial_record import TrialRecord

CLOCKED = {
    "origin": {"started_at"},
    "plan": {"step_seconds", "memory_excess", "summary"},
    "result": {"seconds", "measured", "curve"},
    "attempts": True,
}
"""What depends on this machine: its speed, and its memory, which trials side by side share."""


def without_clock(trial: TrialRecord) -> dict[str, Any]:
    """All that does not depend on how fast the machine is."""
    curve = [point.model_dump(exclude={"seconds"}) for point in trial.result.curve]
    return trial.model_dump(exclude=CLOCKED) | {"curve": curve}


def test_results_equal_those_of_training_alone(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    """To the bit: metrics, curves, test scores, and the weights taken away."""
    outs = [tmp_path / at_once / "s" for at_once in ("2", "1")]
    for out in outs:
        # random proposals depend on nothing but their number
        words = ("trials=2", *SMALL, "sampler=random", f"parallel={out.parent.name}")
        dhen_search("run", "--data", click_log, "--out", out, *words)
    records = [read_study(out) for out in outs]
    trials = [[without_clock(trial) for trial in record.trials] for record in records]
    assert trials[0] == trials[1]
    assert records[0].front == records[1].front
    weights = [(out / "best" / "weights.safetensors").read_bytes() for out in outs]
    assert weights[0] == weights[1]
