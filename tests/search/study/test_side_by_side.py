"""Candidates side by side: the same results as alone, equal ones trained once, no harm to a neighbour."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from command_line import SMALL, Run

from search.read_study import read_study
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Outcome, TrialRecord

TWO = ("parallel=2", "sampler=random", "baseline_trials=2")
"""Random proposals depend on nothing but their number, so they are the same in whatever order trials end."""
CLOCKED = {
    "origin": {"started_at"},
    "plan": {"step_seconds", "memory_excess", "summary"},
    "result": {"seconds", "measured", "curve"},
    "attempts": True,
}
"""What depends on this machine: its speed, and its memory, which trials side by side share."""
ONE_NETWORK = """
modules: {{dcn_v2: {{layers: 1}}}}
slots: 1
depth: 1
out_embeddings: 2
raw_numeric: false
ensemble: [concat, sum, weighted_sum]
training: {{learning_rate: {rate}}}
"""
"""An ensemble of one module is a sum, so that all points are the same network."""


def without_clock(trial: TrialRecord) -> dict[str, Any]:
    """All that does not depend on how fast the machine is."""
    curve = [point.model_dump(exclude={"seconds"}) for point in trial.result.curve]
    return trial.model_dump(exclude=CLOCKED) | {"curve": curve}


def test_results_equal_those_of_training_alone(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    """To the bit: metrics, curves, test scores, and the weights taken away."""
    outs = [tmp_path / at_once / "s" for at_once in ("2", "1")]
    for out in outs:
        words = ("trials=4", *SMALL, *TWO, f"parallel={out.parent.name}")
        dhen_search("run", "--data", click_log, "--out", out, *words)
    records = [read_study(out) for out in outs]
    trials = [[without_clock(trial) for trial in record.trials] for record in records]
    assert trials[0] == trials[1]
    assert records[0].front == records[1].front
    weights = [(out / "best" / "weights.safetensors").read_bytes() for out in outs]
    assert weights[0] == weights[1]


def test_a_loss_that_diverges_ends_each_equal_network_alone(
    dhen_search: Run, click_log: Path, tmp_path: Path
) -> None:
    """It has no result that could be shared, and its neighbour goes on."""
    space, out = tmp_path / "space.yaml", tmp_path / "study"
    space.write_text(ONE_NETWORK.format(rate="1.0e+30"))
    dhen_search("run", "--data", click_log, "--out", out, "trials=4", *SMALL, *TWO, f"space={space}")
    record = read_study(out)
    assert [trial.result.outcome for trial in record.candidates] == [Outcome.DIVERGED] * 4
    assert all("at step" in (trial.result.error or "") for trial in record.candidates)
    assert record.finished


def test_minutes_are_of_the_wall_clock(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    """A study of minutes ends, also where the space has nothing new long before."""
    space, out = tmp_path / "space.yaml", tmp_path / "study"
    space.write_text(ONE_NETWORK.format(rate="0.001"))
    words = ("trials=null", "minutes=60", *SMALL, *TWO, f"space={space}")
    dhen_search("run", "--data", click_log, "--out", out, *words)
    record: StudyRecord = read_study(out)
    assert record.finished
    assert sum(trial.origin.reused_from is None for trial in record.candidates) == 1
    dhen_search("run", "--data", click_log, "--out", out, *words)
    assert len(read_study(out).candidates) == len(record.candidates)  # minutes that were left stay so
