"""One-bit Adam through the public command line, as a setting and as an axis of a space."""

from __future__ import annotations

from pathlib import Path

from command_line import Run

from search.read_study import read_study
from trials.records.trial_record import Outcome, TrialKind

WORDS = (
    *("demo.rows=2000", "trials=1", "baseline_trials=1", "sampler=random", "threads=1", "parallel=1"),
    *("training.epochs=1", "training.batch_size=64", "training.precision=fp32", "ranks=1x2"),
    "training.optimizer=onebit_adam",
)
SPACE = """
layers: shared
depth: [1]
slots: 1
modules: {dcn_v2: {layers: [1, 2]}}
model: {embedding_dim: [4]}
training: {optimizer: [adamw, onebit_adam]}
"""


def test_a_study_trains_by_it_on_ranks_and_refuses_what_shards(dhen_search: Run, tmp_path: Path) -> None:
    space, out = tmp_path / "space.yaml", tmp_path / "study"
    space.write_text(SPACE)
    dhen_search("run", "--out", out, *WORDS, f"space={space}")
    baseline, *candidates = read_study(out).trials
    assert baseline.kind is TrialKind.BASELINE
    assert baseline.job.training["optimizer"] == "onebit_adam"
    assert all("training.optimizer" in trial.point for trial in candidates)
    for trial in (baseline, *candidates):
        (attempt,) = trial.attempts
        assert (attempt.outcome, attempt.executed) == (Outcome.COMPLETED, "dp")
    (log,) = out.glob("trials/00000/attempt0.rank1.log")
    assert "one-bit Adam compresses from step" in log.read_text()
    refused = tmp_path / "refused"
    said = dhen_search("run", "--out", refused, *WORDS, "technique=fsdp", code=2).stderr
    assert "Give technique=dp or technique=zero1, or leave training.optimizer out." in " ".join(said.split())
    assert not list(refused.glob("trials/*/*.log"))
