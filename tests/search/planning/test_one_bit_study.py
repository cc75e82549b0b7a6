"""One-bit Adam through the public command line, as a setting and as an axis of a space."""

from __future__ import annotations

from pathlib import Path

from command_line import Run

from search.read_study import read_study
from trials.record import Outcome

WORDS = (
    *("demo.rows=4000", "trials=2", "baseline_trials=1", "sampler=random", "threads=1", "parallel=1"),
    *("training.epochs=1", "training.batch_size=128", "training.precision=fp32", "training.order=log"),
)


def test_a_study_trains_by_it_on_ranks_and_refuses_what_shards(dhen_search: Run, tmp_path: Path) -> None:
    """Its space chooses between the optimizers, and the baseline has it by setting."""
    space, out = tmp_path / "space.yaml", tmp_path / "study"
    space.write_text(
        "layers: shared\ndepth: [1]\nslots: 1\nmodules: {dcn_v2: {layers: [1, 2]}}\nmodel: {embedding_dim: [4]}\n"
        "training: {optimizer: [adamw, onebit_adam]}\n"
    )
    one_bit = ("training.optimizer=onebit_adam", "ranks=1x2", f"space={space}")
    dhen_search("run", "--out", out, *WORDS, "trials=4", *one_bit, "prefer=fastest")
    trials = read_study(out).trials
    by_optimizer = {trial.job.training.get("optimizer", "adamw") for trial in trials}
    assert by_optimizer == {"adamw", "onebit_adam"}
    assert all(trial.attempts[-1].outcome is Outcome.COMPLETED for trial in trials)
    logs = "".join(path.read_text() for path in out.glob("**/*.log"))
    assert "one-bit Adam compresses from step" in logs
    said = dhen_search("run", "--out", tmp_path / "no", *WORDS, *one_bit[:2], "technique=fsdp", code=2).stderr
    assert "Give technique=dp or technique=zero1, or optimizer=adamw." in " ".join(said.split())
    assert not (tmp_path / "no" / "study.db").exists()
